"""TLS between the pods of a job or pool, and between them and the operator."""

import ssl
from typing import Annotated

from pydantic import Field, field_validator

from grpo_operator.api.base import Model
from grpo_operator.api.rules import Rule, UpdateRule

SecretName = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]
_RULES: tuple[Rule["TlsSpec"], ...] = (
    Rule(
        "has(self.secretName) == has(self.caBundle)",
        "set secretName and caBundle together, or neither: without them the operator makes the certificates",
        lambda tls: (tls.secret_name is None) == (tls.ca_bundle is None),
    ),
)
_UPDATE_RULES = (
    UpdateRule(
        "has(oldSelf.secretName) == has(self.secretName)"
        " && (!has(self.secretName) || oldSelf.secretName == self.secretName)",
        "tls.secretName is fixed once the object exists: create a new one",
    ),
)


class TlsSpec(Model):
    """HTTPS on the ports of controller, agents and engines, whose ``/generate`` then needs a key, too.

    Clients verify that a server's certificate is for the job or pool. By default the operator makes the
    certificates and renews them every 30 days. Links of NCCL, gloo and Ray are not encrypted.
    """

    rules = _RULES
    update_rules = _UPDATE_RULES
    secret_name: SecretName | None = Field(
        None,
        description="Secret in the namespace with tls.crt and tls.key for the DNS name NAME.NAMESPACE.grpo of"
        " the job or pool, as cert-manager creates it; pods use a renewed certificate within minutes",
    )
    ca_bundle: str | None = Field(
        None,
        min_length=1,
        max_length=65536,
        pattern=r"^\s*-----BEGIN CERTIFICATE-----[\s\S]*-----END CERTIFICATE-----\s*$",
        description="certificates (PEM) that the pods and the operator trust, with secretName; may change: to"
        " replace a CA, add the new one first, and remove the old one when all certificates are of the new",
    )

    @field_validator("ca_bundle")
    @classmethod
    def _is_certificates(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                ssl.create_default_context(cadata=value)
            except ssl.SSLError as error:
                raise ValueError(f"{error}: give one or more certificates of CAs in PEM") from error
        return value
