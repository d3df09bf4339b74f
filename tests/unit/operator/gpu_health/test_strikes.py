"""Strikes, quarantine and their limits on a fake clock; conditions and taints of nodes."""

from typing import Any

import pytest

from grpo_operator.api.gpu_messages import GpuFinding, Severity
from grpo_operator.api.v1alpha1.scheduling import SchedulingSpec
from grpo_operator.plan.gpu_health.node_state import (
    CONDITION,
    TAINT,
    avoided_hosts,
    condition_due,
    tainted,
    with_taints_seen,
)
from grpo_operator.plan.gpu_health.strikes import (
    Judged,
    Limits,
    NodeRecord,
    Records,
    Strike,
    fresh,
    judge,
    remembered,
    sick_gpu,
    sick_nodes,
    to_replace,
)
from support.clocks import FakeClock
from support.objects import pod

LIMITS = Limits(window=3600, share=0.1)
LOST = GpuFinding(
    gpu="GPU-a", index=3, severity=Severity.SICK, reason="Xid79", text="XID 79: fell off the bus", since=1
)


def _judge(records: Records, *nodes: str, at: float, owned: int = 100, cluster: int = 100) -> Judged:
    """Judge nodes that all belong to one job of ``owned`` nodes."""
    places = {"GRPOJob default/a": {f"n{i:03}" for i in range(owned)}}
    return judge(records, dict.fromkeys(nodes, sick_gpu(LOST, started=0)), places, cluster, at, LIMITS)


def _node(name: str, *conditions: dict[str, Any], taints: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": f"host-{name}"}},
        "spec": {"taints": [{"key": key, "effect": "NoSchedule"} for key in taints]},
        "status": {"conditions": list(conditions)},
    }


def test_one_strike_replaces_pods_and_a_second_one_within_the_window_is_quarantine() -> None:
    clock = FakeClock()
    first = _judge({}, "n001", at=clock.now())
    assert not first.records["n001"].quarantined
    assert first.struck["n001"] == (
        "node n001: XID 79: fell off the bus (GPU-a, index 3): strike 1 of 2, its GPU pods are replaced"
    )
    clock.sleep(3599)
    kept = remembered(first.records, {"n001"}, clock.now(), LIMITS)
    second = _judge(kept, "n001", at=clock.now())
    assert second.records["n001"].quarantined
    assert second.struck["n001"].endswith("strike 2 of 2, the node is in quarantine")


def test_the_reporting_pod_does_not_count_again_although_the_api_servers_clock_is_ahead() -> None:
    judged = judge({}, {"n1": sick_gpu(LOST, started=1030)}, {}, 10, 1000, LIMITS)
    assert judged.records["n1"].strikes[0].at == 1030


def test_a_strike_outside_of_the_window_is_forgotten_and_a_quarantine_is_not() -> None:
    once = _judge({}, "n001", at=1000).records
    assert remembered(once, {"n001"}, 4600, LIMITS) == {}
    twice = _judge(once, "n001", at=2000).records
    assert remembered(twice, {"n001"}, 1e9, LIMITS) == twice
    assert remembered(twice, {"n002"}, 2001, LIMITS) == {}, "the node is gone"


def test_only_pods_that_started_after_the_last_strike_count_and_those_before_leave() -> None:
    record = NodeRecord(strikes=(Strike(at=1_000_000_000, reason="Xid79", text=""),))
    old, new = pod("trainer", 0), pod("rollout", 1)
    old["metadata"]["creationTimestamp"] = "2001-09-09T01:46:39Z"
    new["metadata"]["creationTimestamp"] = "2001-09-09T01:46:41Z"
    assert not fresh(old, record) and fresh(new, record) and fresh(old, None)
    controller, leaving = pod("controller"), pod("trainer", 2, deleting=True)
    for made in (controller, leaving):
        made["metadata"]["creationTimestamp"] = old["metadata"]["creationTimestamp"]
    pods = [made | {"spec": {"nodeName": "n1"}} for made in (old, new, controller, leaving)]
    assert [p["metadata"]["name"] for p in to_replace(pods, {"n1": record})] == ["tiny-moe-trainer-0"]
    assert list(to_replace(pods, {})) == []


@pytest.mark.parametrize(
    ("owned", "cluster", "allowed", "named"),
    [
        (64, 64, 6, "of 64 GPU nodes of the cluster"),
        (20, 1000, 2, "of 20 GPU nodes of GRPOJob default/a"),
        (4, 4, 1, "of 4 GPU nodes of the cluster"),
    ],
)
def test_an_agent_gone_wild_moves_a_bounded_share_of_the_nodes(
    owned: int, cluster: int, allowed: int, named: str
) -> None:
    nodes = [f"n{i:03}" for i in range(owned)]
    judged = _judge({}, *nodes, at=1000, owned=owned, cluster=cluster)
    assert len(judged.struck) == allowed and len(judged.spared) == owned - allowed
    text = judged.spared[nodes[-1]]
    assert f"{allowed} {named}" in text and "gpuHealth.maxNodesPercent=10" in text
    again = _judge(judged.records, *nodes, at=1010, owned=owned, cluster=cluster)
    assert set(again.struck) == set(judged.struck), "nodes with a strike stay judged; no other one is added"


def test_old_quarantines_do_not_use_up_the_limit() -> None:
    record = NodeRecord(strikes=(Strike(at=0, reason="Xid79", text=""),) * 2, quarantined=True)
    judged = _judge({"n000": record}, "n001", at=5000, owned=4, cluster=4)
    assert set(judged.struck) == {"n001"}


def test_a_job_sees_the_nodes_that_struck_it() -> None:
    records = _judge({}, "n001", at=1000).records
    assert sick_nodes(records, "GRPOJob default/a") == (records["n001"].strikes[0].text,)
    assert sick_nodes(records, "GRPOJob default/b") == ()


def test_records_survive_the_ledger() -> None:
    record = _judge({}, "n001", at=1000).records["n001"]
    assert NodeRecord.model_validate_json(record.model_dump_json(by_alias=True)) == record


def test_a_condition_follows_strikes_and_a_healthy_agent_clears_it() -> None:
    record = _judge({}, "n1", at=1000).records["n1"]
    bad = condition_due(_node("n1"), record, set(), "t1")
    assert bad is not None
    assert (bad["type"], bad["status"], bad["reason"], bad["lastTransitionTime"]) == (
        CONDITION,
        "False",
        "Xid79",
        "t1",
    )
    assert "GPU-a" in bad["message"]
    assert condition_due(_node("n1", bad), record, set(), "t2") is None, "it is written once"
    good = condition_due(_node("n1", bad), record, {"n1"}, "t2")
    assert good is not None and (good["status"], good["lastTransitionTime"]) == ("True", "t2")
    assert condition_due(_node("n1", bad), None, set(), "t3") is not None, "the strike is forgotten"
    assert condition_due(_node("n1", good), None, set(), "t3") is None
    assert condition_due(_node("n2"), None, {"n2"}, "t1") is None, "healthy nodes get no condition"
    jailed = record.updated(quarantined=True)
    assert condition_due(_node("n1", bad), jailed, {"n1"}, "t2") is None, (
        "quarantine stays until it is lifted"
    )


def test_a_taint_is_added_beside_others_and_its_removal_lifts_the_quarantine() -> None:
    assert [t["key"] for t in tainted(_node("n1", taints=("other",)))] == ["other", TAINT]
    records = {"n1": NodeRecord(quarantined=True)}
    assert with_taints_seen(records, [_node("n1")]) == records, "not tainted yet"
    seen = with_taints_seen(records, [_node("n1", taints=(TAINT,))])
    assert seen["n1"].tainted
    assert with_taints_seen(seen, [_node("n1")]) == {}


@pytest.mark.parametrize(
    ("tolerations", "taints", "avoided"),
    [
        ([], False, ("host-n1",)),
        ([], True, ()),
        ([{"operator": "Exists"}], True, ("host-n1",)),
        ([{"key": TAINT, "operator": "Exists"}], True, ("host-n1",)),
        ([{"key": TAINT}], True, ("host-n1",)),
        ([{"operator": "Exists", "effect": "NoExecute"}], True, ()),
        ([{"key": "nvidia.com/gpu", "operator": "Exists"}], True, ()),
    ],
)
def test_an_affinity_keeps_off_the_pods_that_no_taint_keeps_off(
    tolerations: list[dict[str, str]], taints: bool, avoided: tuple[str, ...]
) -> None:
    scheduling = SchedulingSpec.model_validate({"tolerations": tolerations})
    records = {"n1": NodeRecord(quarantined=True), "n2": NodeRecord()}
    assert avoided_hosts(records, [_node("n1"), _node("n2")], scheduling, taints) == avoided
