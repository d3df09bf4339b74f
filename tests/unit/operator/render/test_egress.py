"""Connections that pods may open: scheduling.egress as a NetworkPolicy."""

from typing import Any

import pytest
from pydantic import ValidationError

from grpo_operator.api.v1alpha1.egress import EgressPeer, EgressSpec
from grpo_operator.render.policies import ANY_JOB, network_policy
from grpo_operator.settings import OperatorSettings
from support.objects import job

SETTINGS = OperatorSettings("t:a", "r:a", namespace="ops")
OWN = {"podSelector": {"matchLabels": {"rl.grpo.dev/job": "tiny-moe"}}}
POOL = {"matchLabels": {"rl.grpo.dev/rolloutpool": "shared"}}


def _policy(egress: EgressSpec | None, allowed: dict[str, Any] | None = None) -> dict[str, Any]:
    return dict(network_policy(job(), SETTINGS, egress, allowed)["spec"])


def test_without_the_field_pods_connect_to_everything() -> None:
    policy = _policy(None)
    assert policy["policyTypes"] == ["Ingress"] and "egress" not in policy


def test_an_empty_field_leaves_the_own_pods_and_dns() -> None:
    policy = _policy(EgressSpec())
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    own, dns = policy["egress"]
    assert own == {"to": [OWN]}
    assert {(p["port"], p["protocol"]) for p in dns["ports"]} == {
        (53, "UDP"), (53, "TCP"), (5353, "UDP"), (5353, "TCP")
    }  # fmt: skip
    assert "to" not in dns
    assert policy["ingress"] == _policy(None)["ingress"]


def test_a_job_reaches_its_shared_pool_and_a_pool_its_jobs() -> None:
    for allowed in (POOL, ANY_JOB):
        assert _policy(EgressSpec(), allowed)["egress"][0] == {"to": [OWN, {"podSelector": allowed}]}


def test_peers_are_addresses_and_namespaces_with_ports() -> None:
    peers = [
        EgressPeer(cidr="192.0.2.0/24", ports=[443]),
        EgressPeer(cidr="2001:db8::/32"),
        EgressPeer(namespace="judges", ports=[8000, 8001]),
    ]
    store, wide, judges = _policy(EgressSpec(to=peers))["egress"][2:]
    assert store == {
        "to": [{"ipBlock": {"cidr": "192.0.2.0/24"}}], "ports": [{"port": 443, "protocol": "TCP"}]
    }  # fmt: skip
    assert wide == {"to": [{"ipBlock": {"cidr": "2001:db8::/32"}}]}
    labels = {"kubernetes.io/metadata.name": "judges"}
    assert judges["to"] == [{"namespaceSelector": {"matchLabels": labels}}]
    assert [port["port"] for port in judges["ports"]] == [8000, 8001]


@pytest.mark.parametrize("cidr", ["10.0.0.1/8", "300.0.0.0/8", "10.0.0.0/40", "10.0.0.0", "host/8", ":/1"])
def test_addresses_that_are_none_are_refused_with_an_example(cidr: str) -> None:
    with pytest.raises(ValidationError, match=r"use NETWORK/BITS|should match pattern"):
        EgressPeer(cidr=cidr)
