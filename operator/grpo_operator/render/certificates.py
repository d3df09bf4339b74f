"""Certificates of the pods of jobs and pools (pure).

Everything follows from the namespace's master key and the time: the key of the namespace's CA, the key of
each job or pool, and, within a period, each byte of the certificates. So nothing is kept besides, and an
operator that renders the same certificates again changes nothing. Renewed certificates have the same keys:
pods that have the files of the period before, and pods that have the new ones, trust each other.
"""

import hashlib
import hmac
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from grpo_operator.api.names import owner_of

RENEWED = timedelta(days=30)
VALID = timedelta(days=180)  # an operator may be away for the rest
_CA_VALID = timedelta(days=365)
_SKEW = timedelta(days=1)  # of clocks
_CURVE = ec.SECP256R1()
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551


@dataclass(frozen=True, slots=True)
class Authority:
    """CA of a namespace, for names of that namespace only. ``master``: the namespace's master key."""

    master: str
    namespace: str

    def trusted(self, now: float) -> str:
        """Return the CA's certificate (PEM)."""
        key, begin = self._key(), period(now)
        builder = (
            _builder(self._subject(), self._subject(), begin, _CA_VALID, _number(self.master, f"ca/{begin}"))
            .public_key(key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(sign_certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(
                x509.NameConstraints([x509.DNSName(f"{self.namespace}.grpo")], None), critical=True
            )
        )
        return self._signed(builder)

    def certificate(self, owner: dict[str, Any], now: float) -> str:
        """Return the certificate (PEM) of the pods of a job, or of a pool without a job."""
        name, key, begin = owner_of(owner).tls_name, _owner_key(self.master, owner), period(now)
        subject = x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, "grpo-operator")])
        number = _number(self.master, f"certificate/{_identity(owner)}/{begin}")
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key().public_key())
        builder = (
            _builder(subject, self._subject(), begin, VALID, number)
            .public_key(key.public_key())
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(sign_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(authority, critical=False)
        )
        return self._signed(builder)

    def is_of(self, trusted: str) -> bool:
        """Return whether certificates (PEM) of ``trusted`` are of this CA."""
        found = x509.load_pem_x509_certificates(trusted.encode())
        return all(certificate.subject == self._subject() for certificate in found)

    def _key(self) -> ec.EllipticCurvePrivateKey:
        return _key_of(self.master, "tls/ca")

    def _subject(self) -> x509.Name:
        """Return the name of the CA, which differs from that of another master key."""
        mark = hmac.new(self.master.encode(), b"tls/name", hashlib.sha256).hexdigest()[:8]
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"grpo-operator {mark}")])

    def _signed(self, builder: x509.CertificateBuilder) -> str:
        signed = builder.sign(self._key(), hashes.SHA256(), ecdsa_deterministic=True)
        return signed.public_bytes(serialization.Encoding.PEM).decode()


def private_key(master: str, owner: dict[str, Any]) -> str:
    """Return the key (PEM) of the pods of a job, or of a pool without a job."""
    return (
        _owner_key(master, owner)
        .private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        .decode()
    )


def period(now: float) -> datetime:
    """Return when the period of a time (Unix) began. Certificates are renewed with each period."""
    seconds = RENEWED.total_seconds()
    return datetime.fromtimestamp(now // seconds * seconds, UTC)


def _owner_key(master: str, owner: dict[str, Any]) -> ec.EllipticCurvePrivateKey:
    return _key_of(master, f"tls/{_identity(owner)}")


def _identity(owner: dict[str, Any]) -> str:
    return f"{owner['kind']}/{owner['metadata']['uid']}"


def _key_of(master: str, purpose: str) -> ec.EllipticCurvePrivateKey:
    digest = hmac.new(master.encode(), purpose.encode(), hashlib.sha512).digest()
    return ec.derive_private_key(int.from_bytes(digest) % (_ORDER - 1) + 1, _CURVE)


def _number(master: str, purpose: str) -> int:
    """Return a serial number: above 0, and unique for a CA."""
    return int.from_bytes(hmac.new(master.encode(), purpose.encode(), hashlib.sha256).digest()[:16]) | 1


def _builder(
    subject: x509.Name, issuer: x509.Name, begin: datetime, valid: timedelta, number: int
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).serial_number(number)
    return builder.not_valid_before(begin - _SKEW).not_valid_after(begin + valid)


def _usage(*, sign_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not sign_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=sign_certificates,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )
