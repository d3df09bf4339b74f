"""Addresses of both families: in URLs, of services, and of listening servers."""

import json
import socket
from typing import Any
from urllib.parse import urlsplit

import pytest

from grpo_operator.api.urls import host_port, pod_url
from grpo_worker.common.listeners import listeners
from grpo_worker.common.own_address import loopback, only_ipv6
from grpo_worker.common.service_addresses import ServiceAddresses
from grpo_worker.rollout.sglang.experts_plugin import location
from grpo_worker.weightsync.agent.engine_place import EnginePlace
from grpo_worker.weightsync.agent.host_rendezvous import HostRendezvous, HostReport
from support.engine_server import free_port

V4, V6 = "10.0.0.7", "fd00::7"


def _resolve_to(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """Let the resolver answer every name with these addresses, as a pod's hosts file or DNS does."""

    def answer(*_: Any, **__: Any) -> list[Any]:
        families = [socket.AF_INET6 if ":" in address else socket.AF_INET for address in addresses]
        pairs = zip(families, addresses, strict=True)
        return [(family, socket.SOCK_STREAM, 6, "", (address, 0)) for family, address in pairs]

    monkeypatch.setattr(socket, "getaddrinfo", answer)


def test_urls_bracket_addresses_of_ipv6_only() -> None:
    assert pod_url(V4, 9000, "/v1/status") == "http://10.0.0.7:9000/v1/status"
    assert pod_url(V6, 9000, "/v1/status") == "http://[fd00::7]:9000/v1/status"
    assert pod_url("engine-0", 9000, tls=True) == "https://engine-0:9000"
    place = urlsplit(pod_url(V6, 9000))
    assert (place.hostname, place.port) == (V6, 9000)
    assert host_port(V6, 1) == "[fd00::7]:1"


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://10.0.0.7:9000", "http://10.0.0.7:9000"),
        ("http://fd00::7:9000", "http://[fd00::7]:9000"),
        ("https://[fd00::7]:9000", "https://[fd00::7]:9000"),
    ],
)
def test_the_location_of_routed_experts_is_a_url_for_both_families(given: str, url: str) -> None:
    assert location(given) == url


def test_a_service_has_the_addresses_of_one_family(monkeypatch: pytest.MonkeyPatch) -> None:
    for found, used in (((V6, V4), [V4]), ((V6, "fd00::6", V6), ["fd00::6", V6]), ((), [])):
        _resolve_to(monkeypatch, *found)
        assert ServiceAddresses("service", 9000)() == used


def test_the_loopback_is_that_of_the_pods_family(monkeypatch: pytest.MonkeyPatch) -> None:
    for found, own in (((V4,), "127.0.0.1"), ((V4, V6), "127.0.0.1"), ((V6,), "::1")):
        _resolve_to(monkeypatch, *found)
        assert (loopback(), only_ipv6()) == (own, own == "::1")


def test_servers_listen_on_both_families_and_see_plain_addresses() -> None:
    port = free_port()
    sockets = listeners(port)
    seen = {}
    for server, host in zip(sockets, ("127.0.0.1", "::1"), strict=True):
        with server, socket.create_connection((host, port), 5):
            connection, address = server.accept()
            connection.close()
            seen[host] = address[0]
    assert seen == {"127.0.0.1": "127.0.0.1", "::1": "::1"}


def test_a_server_may_listen_on_one_address() -> None:
    for host in ("127.0.0.1", "::1"):
        (server,) = listeners(0, host)
        with server:
            assert server.getsockname()[0] == host


def test_the_rendezvous_of_hosts_brackets_the_address() -> None:
    place = EnginePlace(V6, HostRendezvous(2))
    answer = place.answer(HostReport(0, "pod", "process", "", "", ""), serving=False)
    assert answer["rendezvous"] == "[fd00::7]:20000" and json.dumps(answer)
