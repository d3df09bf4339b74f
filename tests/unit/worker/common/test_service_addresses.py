"""Pods behind a headless service, also while the cluster's DNS is away."""

import socket
from typing import Any

import pytest

from grpo_worker.common.service_addresses import ServiceAddresses

Answer = list[Any] | socket.gaierror
V4 = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 9000)) for address in ("10.0.0.2", "10.0.0.1")]


class Dns:
    """Stands in for the resolver. ``answer``: of the next look-ups."""

    def __init__(self) -> None:
        self.answer: Answer = []

    def __call__(self, *_: Any) -> list[Any]:
        if isinstance(self.answer, socket.gaierror):
            raise self.answer
        return self.answer


@pytest.fixture
def dns(monkeypatch: pytest.MonkeyPatch) -> Dns:
    stand_in = Dns()
    monkeypatch.setattr(socket, "getaddrinfo", stand_in)
    return stand_in


@pytest.mark.parametrize("error", [socket.EAI_AGAIN, socket.EAI_FAIL])
def test_while_dns_is_away_the_last_addresses_are_used(dns: Dns, error: int) -> None:
    addresses = ServiceAddresses("engines.default.svc", 9000)
    dns.answer = socket.gaierror(error, "away")
    assert addresses() == []
    dns.answer = V4
    before = addresses()
    dns.answer = socket.gaierror(error, "away")
    assert addresses() == addresses() == before


def test_a_service_without_pods_has_no_addresses(dns: Dns) -> None:
    addresses = ServiceAddresses("engines.default.svc", 9000)
    dns.answer = V4
    addresses()
    dns.answer = socket.gaierror(socket.EAI_NONAME, "no such name")
    assert addresses() == []
