"""Rounds of GPU health against an API server in memory: what is written, deleted and remembered."""

from collections.abc import Iterable
from typing import Any

import pytest
from kubernetes.client import ApiException

from grpo_operator.api.gpu_messages import GpuFinding, GpuReport, Severity
from grpo_operator.api.names import Owner
from grpo_operator.apply.gpu_ledger import GpuLedger
from grpo_operator.apply.writer import Writer
from grpo_operator.handlers.gpu_health import GpuHealth
from grpo_operator.observe.cache import Cache
from grpo_operator.plan.gpu_health.node_state import CONDITION, TAINT
from grpo_operator.settings import GpuHealthSettings
from support.clocks import FakeClock
from support.objects import job, pod

SICK = GpuFinding(gpu="GPU-a", index=0, severity=Severity.SICK, reason="Xid79", text="XID 79", since=1)
DEGRADED = SICK.updated(severity=Severity.DEGRADED, reason="RemapPending")
ALLOWED = GpuHealthSettings(node_conditions=True, taints=True, max_nodes_percent=50)


class _Kube:
    """The part of the API server that the rounds use."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self.ledger: dict[str, Any] | None = None
        self.events: list[tuple[str, str]] = []
        self.deleted: list[str] = []
        self.fails = ""  # resource whose writes are refused

    async def get(self, *_: str) -> dict[str, Any] | None:
        return self.ledger

    async def apply(self, _: str, plural: str, manifest: dict[str, Any]) -> dict[str, Any]:
        assert plural == "configmaps"
        self.ledger = manifest
        return manifest

    async def create(self, _: str, plural: str, manifest: dict[str, Any]) -> dict[str, Any]:
        assert plural == "events"
        self.events.append((manifest["reason"], manifest["message"]))
        return manifest

    async def delete(
        self, _: str, plural: str, namespace: str, name: str, uid: str, grace: int | None
    ) -> None:
        assert (plural, uid, grace) == ("pods", f"uid-{name}", None)
        self.deleted.append(name)
        self._cache.forget("pods", (namespace, name))

    async def patch(
        self, _: str, plural: str, manifest: dict[str, Any], content: str, subresource: str = ""
    ) -> dict[str, Any]:
        assert plural == "nodes"
        if self.fails == plural + subresource:
            raise ApiException(403)
        node = self._cache.node(manifest["metadata"]["name"])
        assert node is not None
        if subresource:
            (condition,) = manifest["status"]["conditions"]
            others = [c for c in node["status"]["conditions"] if c["type"] != condition["type"]]
            node["status"]["conditions"] = [*others, condition]
        else:
            node["spec"]["taints"] = manifest["spec"]["taints"]
        return node


class World:
    """A job with one training pod on each of its nodes, and agents that report what a test says."""

    def __init__(self, nodes: int, settings: GpuHealthSettings) -> None:
        self.cache, self.clock = Cache(), FakeClock()
        self.clock.time = 1_000_000_000.0
        self.kube = _Kube(self.cache)
        self.reports: dict[str, GpuReport] = {}  # by pod
        self.changed: list[Owner] = []
        self.settings = settings
        owner = job()
        owner["metadata"]["creationTimestamp"] = "2001-01-01T00:00:00Z"
        self.cache.store("grpojobs", {"type": "ADDED", "object": owner})
        for number in range(nodes):
            node: dict[str, Any] = {
                "metadata": {"name": f"n{number}", "resourceVersion": "1"},
                "spec": {},
                "status": {"conditions": [{"type": "Ready", "status": "True"}]},
            }
            node["status"]["allocatable"] = {"nvidia.com/gpu": "8"}
            self.cache.store("nodes", {"type": "ADDED", "object": node})
            self.start(number, number, "2001-09-09T01:00:00Z")
        self.restart()

    def restart(self) -> None:
        """Start a new operator on the same cluster."""
        self.health = GpuHealth(
            self.cache, self, Writer(self.kube), GpuLedger(self.kube, "ops"), self.settings,  # type: ignore[arg-type]
            self._changed, self.clock.now,
        )  # fmt: skip

    def start(self, number: int, node: int, created: str) -> None:
        """Start a training pod whose agent finds nothing."""
        made = pod("trainer", number)
        name = made["metadata"]["name"]
        made["metadata"] |= {"namespace": "default", "uid": f"uid-{name}", "creationTimestamp": created}
        limits = {"limits": {"nvidia.com/gpu": "8"}}
        made["spec"] = {"nodeName": f"n{node}", "containers": [{"resources": limits}]}
        self.cache.store("pods", {"type": "ADDED", "object": made})
        self.reports[name] = GpuReport(gpus=8)

    def report(self, number: int, *findings: GpuFinding) -> None:
        self.reports[f"tiny-moe-trainer-{number}"] = GpuReport(gpus=8, findings=findings)

    async def gpus(self, asked: dict[str, Any]) -> GpuReport | None:
        return self.reports[asked["metadata"]["name"]]

    def _changed(self, owners: Iterable[Owner]) -> None:
        self.changed += owners

    async def rounds(self, count: int = 1) -> None:
        for _ in range(count):
            await self.health.round()
            self.clock.sleep(10)

    def condition(self, node: int) -> dict[str, Any] | None:
        found = self.cache.node(f"n{node}")
        assert found is not None
        return next((c for c in found["status"]["conditions"] if c["type"] == CONDITION), None)

    def taints(self, node: int) -> list[str]:
        found = self.cache.node(f"n{node}")
        assert found is not None
        return [taint["key"] for taint in found["spec"].get("taints") or []]


async def test_a_healthy_cluster_costs_no_write() -> None:
    world = World(4, ALLOWED)
    world.report(1, DEGRADED)
    await world.rounds(3)
    assert world.kube.ledger is None and not world.kube.events and not world.kube.deleted
    assert world.condition(1) is None and not world.changed


async def test_a_strike_is_recorded_and_told_and_then_the_pod_is_replaced() -> None:
    world = World(4, ALLOWED)
    world.report(1, DEGRADED, SICK)
    await world.rounds()
    assert world.kube.ledger is not None and set(world.kube.ledger["data"]) == {"n1"}
    condition = world.condition(1)
    assert condition is not None and (condition["status"], condition["reason"]) == ("False", "Xid79")
    assert [reason for reason, _ in world.kube.events] == ["GpuSick"] and not world.kube.deleted
    await world.rounds(3)
    assert world.kube.deleted == ["tiny-moe-trainer-1"] and len(world.kube.events) == 1
    assert world.taints(1) == []
    world.start(9, 1, "2001-09-09T01:47:10Z")
    await world.rounds()
    condition = world.condition(1)
    assert condition is not None and condition["status"] == "True", "the new pod's agent finds nothing"
    assert len(world.kube.deleted) == 1


async def _two_strikes(world: World) -> None:
    world.report(1, SICK)
    await world.rounds(2)
    world.start(9, 1, "2001-09-09T01:46:55Z")
    world.report(9, SICK)
    world.restart()  # the operator remembers
    await world.rounds(2)


async def test_a_second_strike_taints_the_node_until_somebody_removes_the_taint() -> None:
    world = World(4, ALLOWED)
    await _two_strikes(world)
    assert world.taints(1) == [TAINT]
    assert world.kube.deleted == ["tiny-moe-trainer-1", "tiny-moe-trainer-9"]
    assert [n["metadata"]["name"] for n in world.cache.usable_nodes] == ["n0", "n2", "n3"]
    world.restart()
    await world.health.load()
    assert world.cache.gpu_records["n1"].quarantined
    await world.rounds(2)
    node = world.cache.node("n1")
    assert node is not None
    node["spec"]["taints"] = []
    await world.rounds(2)
    assert world.taints(1) == [] and world.cache.gpu_records == {} and len(world.cache.usable_nodes) == 4
    condition = world.condition(1)
    assert condition is not None and condition["status"] == "True"


async def test_without_permission_nodes_are_not_written_and_jobs_keep_off() -> None:
    world = World(4, GpuHealthSettings(max_nodes_percent=50))
    world.kube.fails = "nodes"
    await _two_strikes(world)
    assert world.condition(1) is None and world.taints(1) == []
    assert world.cache.gpu_records["n1"].quarantined
    assert Owner("GRPOJob", "default", "tiny-moe") in world.changed
    assert world.kube.deleted == ["tiny-moe-trainer-1", "tiny-moe-trainer-9"]


async def test_agents_gone_wild_move_no_more_pods_than_the_limit_and_it_is_said_once() -> None:
    world = World(8, GpuHealthSettings(max_nodes_percent=25))
    for number in range(8):
        world.report(number, SICK)
    await world.rounds(5)
    assert len(world.kube.deleted) == 2
    reasons = [reason for reason, _ in world.kube.events]
    assert reasons.count("GpuSick") == 2 and reasons.count("GpuSickNotReplaced") == 6
    assert "gpuHealth.maxNodesPercent=25" in world.kube.events[-1][1]


async def test_a_round_that_fails_halfway_is_made_good_by_the_next_one() -> None:
    world = World(4, ALLOWED)
    world.kube.fails = "nodes/status"
    world.report(1, SICK)
    with pytest.raises(ApiException):
        await world.rounds()
    world.kube.fails = ""
    world.restart()
    await world.rounds(2)
    condition = world.condition(1)
    assert condition is not None and condition["status"] == "False"
    assert world.kube.deleted == ["tiny-moe-trainer-1"]
    assert world.cache.gpu_records["n1"].quarantined is False


async def test_a_stragglers_node_is_struck_when_the_job_wants_that() -> None:
    for replace in (False, True):
        world = World(4, ALLOWED)
        owner = world.cache.jobs["default", "tiny-moe"]
        owner["spec"]["restartPolicy"] = {"stragglers": {"replace": replace}}
        slow = {"rank": 9, "pod": "tiny-moe-trainer-1", "node": "n1", "ratio": "2.1", "steps": 5}
        owner["status"] = {"stragglers": [slow]}
        await world.rounds(3)
        assert world.kube.deleted == (["tiny-moe-trainer-1"] if replace else [])
        assert [reason for reason, _ in world.kube.events] == (["StragglerReplaced"] if replace else [])
    assert world.kube.events[0][1] == (
        "node n1: rank 9 computes 2.1 times as long as its peers' median: strike 1 of 2, "
        "its GPU pods are replaced"
    )
    assert not world.cache.gpu_records["n1"].quarantined
