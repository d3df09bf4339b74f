"""Connections that the pods may open to others than their own job."""

import ipaddress
from typing import Annotated

from pydantic import Field, field_validator

from grpo_operator.api.base import Model, Name
from grpo_operator.api.rules import Rule

Port = Annotated[int, Field(ge=1, le=65535)]
_RULES: tuple[Rule["EgressPeer"], ...] = (
    Rule(
        "has(self.cidr) != has(self.namespace)",
        "set exactly one of cidr and namespace: an address outside the cluster, or a namespace of it",
        lambda peer: (peer.cidr is None) != (peer.namespace is None),
    ),
)


class EgressPeer(Model):
    """Addresses or pods that a job's pods may connect to."""

    rules = _RULES
    cidr: str | None = Field(
        None,
        max_length=43,
        pattern=r"^[0-9a-fA-F.:]+/[0-9]{1,3}$",
        description="addresses, as in 10.0.0.0/8 or 192.0.2.10/32: NetworkPolicies know no host names",
    )
    namespace: Name | None = Field(None, description="namespace of the cluster: all of its pods")
    ports: list[Port] = Field(
        default_factory=list, max_length=32, description="TCP ports of the pods or hosts; empty: every port"
    )

    @field_validator("cidr")
    @classmethod
    def _is_network(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                ipaddress.ip_network(value)
            except ValueError as error:
                raise ValueError(f"{error}: use NETWORK/BITS, as in 10.0.0.0/8 or 192.0.2.10/32") from error
        return value


class EgressSpec(Model):
    """Limits of the connections that the pods open.

    Always allowed are the pods of the job, the shared pool and its jobs, and DNS. All else is refused, also
    the metadata service of a cloud. Volumes are not concerned: the nodes mount them.
    """

    to: list[EgressPeer] = Field(
        default_factory=list,
        max_length=64,
        description="what the pods may connect to besides: the object store of checkpoint.store.uri, sources "
        "of model.volume and data.volume, hosts of reward.url, of judges and of trackers",
    )
