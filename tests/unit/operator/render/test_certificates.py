"""Certificates of pods: what follows from the master key, and when they are renewed."""

from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from grpo_operator.render.certificates import RENEWED, VALID, Authority, period, private_key
from support.objects import job

MASTER, NAME = "m" * 64, "tiny-moe.default.grpo"
START = period(1_800_000_000).timestamp()
MONTH = RENEWED.total_seconds()


def _verify(trusted: str, certificate: str, name: str, at: float) -> None:
    """Verify a certificate as a client does. Raises VerificationError."""
    store = Store(x509.load_pem_x509_certificates(trusted.encode()))
    verifier = PolicyBuilder().store(store).time(datetime.fromtimestamp(at, UTC))
    leaf = x509.load_pem_x509_certificate(certificate.encode())
    verifier.build_server_verifier(x509.DNSName(name)).verify(leaf, [])


def test_clients_accept_the_certificate_for_the_name_of_the_job_only() -> None:
    authority = Authority(MASTER, "default")
    certificate = authority.certificate(job(), START)
    _verify(authority.trusted(START), certificate, NAME, START)
    for name in ("another.default.grpo", "tiny-moe.other.grpo", "tiny-moe"):
        with pytest.raises(VerificationError):
            _verify(authority.trusted(START), certificate, name, START)
    with pytest.raises(VerificationError):
        _verify(Authority("n" * 64, "default").trusted(START), certificate, NAME, START)


def test_a_namespaces_ca_signs_names_of_that_namespace_only() -> None:
    elsewhere = job()
    elsewhere["metadata"]["namespace"] = "other"
    certificate = Authority(MASTER, "default").certificate(elsewhere, START)
    with pytest.raises(VerificationError):
        _verify(Authority(MASTER, "default").trusted(START), certificate, "tiny-moe.other.grpo", START)


def test_the_private_key_is_that_of_every_certificate_of_the_job() -> None:
    key = load_pem_private_key(private_key(MASTER, job()).encode(), None).public_key()
    for time in (START, START + 5 * MONTH):
        certificate = Authority(MASTER, "default").certificate(job(), time)
        assert x509.load_pem_x509_certificate(certificate.encode()).public_key() == key
    other = job()
    other["metadata"]["uid"] = "0" * 32
    assert load_pem_private_key(private_key(MASTER, other).encode(), None).public_key() != key


def test_each_byte_is_the_same_within_a_period_and_another_one_in_the_next() -> None:
    authority = Authority(MASTER, "default")
    of = (authority.trusted, lambda now: authority.certificate(job(), now))
    for made in of:
        assert made(START) == made(START + MONTH - 1) != made(START + MONTH)


def test_pods_that_see_a_renewal_at_different_times_accept_each_other() -> None:
    authority = Authority(MASTER, "default")
    periods = [(authority.trusted(t), authority.certificate(job(), t)) for t in (START, START + MONTH)]
    for trusted, _ in periods:
        for _, certificate in periods:
            _verify(trusted, certificate, NAME, START + MONTH + 300)


def test_a_certificate_is_valid_long_after_it_should_have_been_renewed() -> None:
    authority, end = Authority(MASTER, "default"), VALID.total_seconds()
    trusted, certificate = authority.trusted(START), authority.certificate(job(), START + MONTH - 1)
    for good in (START - 3600, START + MONTH, START + end - 1):
        _verify(trusted, certificate, NAME, good)
    with pytest.raises(VerificationError):
        _verify(trusted, certificate, NAME, START + end + 1)
    assert RENEWED + timedelta(days=90) <= VALID, "the operator may be away for a quarter"


def test_serial_numbers_differ() -> None:
    authority = Authority(MASTER, "default")
    made = [authority.certificate(job(), START + n * MONTH) for n in range(3)] + [authority.trusted(START)]
    numbers = {x509.load_pem_x509_certificate(text.encode()).serial_number for text in made}
    assert len(numbers) == len(made)
