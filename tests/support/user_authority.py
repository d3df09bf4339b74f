"""A CA of a user, whose certificates a job's pods are given with ``scheduling.tls.secretName``."""

from datetime import UTC, datetime, timedelta
from functools import cached_property

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_VALID = timedelta(days=1)


class UserAuthority:
    """A CA with a key of its own. ``name``: its common name."""

    def __init__(self, name: str) -> None:
        self._subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())

    @cached_property
    def certificate(self) -> str:
        """Certificate of the CA (PEM)."""
        builder = self._builder(self._subject, self._key).add_extension(
            x509.BasicConstraints(ca=True, path_length=0), critical=True
        )
        return self._signed(builder)

    def issue(self, name: str) -> dict[str, str]:
        """Return a new private key and its certificate for a DNS name, as entries of a Secret."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = self._builder(x509.Name([]), key).add_extension(
            x509.SubjectAlternativeName([x509.DNSName(name)]), critical=True
        )
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return {"tls.crt": self._signed(builder), "tls.key": private.decode()}

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _VALID)
            .not_valid_after(now + _VALID)
        )

    def _signed(self, builder: x509.CertificateBuilder) -> str:
        signed = builder.sign(self._key, hashes.SHA256())
        return signed.public_bytes(serialization.Encoding.PEM).decode()


def serial(certificate: str) -> int:
    """Return the serial number of a certificate (PEM)."""
    return x509.load_pem_x509_certificate(certificate.encode()).serial_number
