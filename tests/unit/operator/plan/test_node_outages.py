"""Nodes that are not Ready, and their pods."""

from typing import Any

import pytest

from grpo_operator.observe.cache import Cache
from grpo_operator.observe.outage_watch import OutageWatch
from grpo_operator.plan.capacity import node_outages
from grpo_operator.plan.capacity.node_outages import Outage
from grpo_operator.plan.times import seconds_of
from support.objects import NOW, pod

SECONDS = {"trainer": 30, "rollout": 60}


def _node(name: str, ready: str, since: str = NOW, **condition: str) -> dict[str, Any]:
    conditions = [{"type": "Ready", "status": ready, "lastTransitionTime": since, **condition}]
    return {"metadata": {"name": name, "uid": name}, "spec": {}, "status": {"conditions": conditions}}


def _on(node: str, pool: str = "trainer", deleting: bool = False) -> dict[str, Any]:
    return pod(pool, deleting=deleting) | {"spec": {"nodeName": node}}


def _watch(now: list[float], *nodes: dict[str, Any]) -> OutageWatch:
    cache = Cache()
    for node in nodes:
        cache.store("nodes", {"type": "ADDED", "object": node})
    return OutageWatch(cache, lambda: now[0])


def test_an_outage_is_measured_on_the_operators_clock() -> None:
    now = [100.0]
    watch = _watch(now, _node("a", "Unknown", "2030-01-01T00:00:00Z"), _node("b", "True"))
    pods = [_on("a"), _on("b"), {"spec": {}}]
    assert watch.outages(pods)["a"].seconds == 0
    now[0] = 125.0
    assert watch.outages(pods) == {"a": Outage("a", True, 25.0, "2030-01-01T00:00:00Z", "")}


def test_a_node_that_was_ready_in_between_starts_again() -> None:
    now, cache = [0.0], Cache()
    watch = OutageWatch(cache, lambda: now[0])
    for time, node in ((0.0, _node("a", "Unknown")), (29.0, _node("a", "Unknown", "2026-01-01T00:00:20Z"))):
        now[0] = time
        cache.store("nodes", {"type": "MODIFIED", "object": node})
        assert watch.outages([_on("a")])["a"].seconds == 0
    now[0] = 40.0
    assert watch.outages([_on("a")])["a"].seconds == 11
    cache.store("nodes", {"type": "MODIFIED", "object": _node("a", "True")})
    assert watch.outages([_on("a")]) == {} and watch._seen == {}


@pytest.mark.parametrize(
    ("silent", "seconds", "deleting", "after", "gone"),
    [
        pytest.param(True, 29.9, True, 99, False, id="it may come back"),
        pytest.param(True, 30, False, 0, True, id="silent for long enough"),
        pytest.param(False, 300, False, 0, False, id="a kubelet that reports gets the deletion first"),
        pytest.param(False, 300, True, 29, False, id="and time to confirm it"),
        pytest.param(False, 300, True, 30, True, id="which it has not done"),
    ],
)
def test_what_a_node_cannot_confirm_is_deleted(
    silent: bool, seconds: float, deleting: bool, after: float, gone: bool
) -> None:
    outages = {"a": Outage("a", silent, seconds, NOW, "")}
    one = _on("a", deleting=deleting)
    now = seconds_of(NOW) + after  # pods that are deleted end at NOW
    assert list(node_outages.unconfirmed([one, _on("b")], outages, SECONDS, now)) == [one] * gone


def test_each_pool_has_its_own_patience() -> None:
    outages = {"a": Outage("a", True, 45, NOW, "")}
    pods = [_on("a"), _on("a", "rollout")]
    assert list(node_outages.unconfirmed(pods, outages, SECONDS, 0)) == pods[:1]
    assert node_outages.awaited(pods[1:], outages, SECONDS) == {"a"}
    assert node_outages.awaited(pods[:1], outages, SECONDS) == set()


@pytest.mark.parametrize(
    ("silent", "nodes", "held"), [(2, 2, False), (3, 6, False), (3, 5, True), (40, 72, True)]
)
def test_nothing_is_replaced_when_most_nodes_are_silent(silent: int, nodes: int, held: bool) -> None:
    made = [_node(str(i), "Unknown" if i < silent else "True") for i in range(nodes)]
    assert bool(node_outages.partition(made)) == held


def test_the_message_names_the_first_nodes_and_counts_the_rest() -> None:
    outages = [Outage(f"n{i}", True, 1, f"2026-01-01T00:00:0{i}Z", "") for i in range(5)]
    text = node_outages.problem(reversed(outages), "")
    assert text.startswith("node n0 has not reported since 2026-01-01T00:00:00Z; node n1")
    assert text.endswith("; and 2 more nodes")
    broken = Outage("x", False, 1, NOW, "container runtime is down")
    assert node_outages.problem([broken], "") == f"node x is not ready since {NOW}: container runtime is down"
    assert node_outages.problem([], "most are silent") == ""
