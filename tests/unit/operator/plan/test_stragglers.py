"""Stragglers in a job's status: condition, list and event name rank, pod and node."""

from typing import Any

from grpo_operator.api.messages import ControllerStatus, Straggler
from grpo_operator.api.v1alpha1.restart_policy import StragglerPolicy
from grpo_operator.api.v1alpha1.status import MAX_STRAGGLERS, GRPOJobStatus
from grpo_operator.plan.gpu_health.slow_ranks import REASON, slow_nodes
from grpo_operator.plan.gpu_health.strikes import NodeRecord, Strike
from grpo_operator.plan.observed import Observed
from grpo_operator.plan.planner.resolve import resolve
from grpo_operator.plan.status.events import job_event
from grpo_operator.plan.status.grpojob import job_status, layout_status
from grpo_operator.plan.status.stragglers import straggler_event
from support.objects import NOW, job, pod, pool_of, running, spec_of

SLOW = Straggler(rank=3, pod="tiny-moe-trainer-1", ratio=2.14, steps=7)


def _observed(*stragglers: Straggler, count: int = 0, phase: str = "Training") -> Observed:
    seen = running(phase, stragglers=list(stragglers), straggler_count=count or len(stragglers))
    for number, one in enumerate(seen.pods):
        one["spec"] = {"nodeName": f"node-{number}"}
    return seen


def _status(observed: Observed) -> GRPOJobStatus:
    manifest = job()
    spec = spec_of(manifest)
    layout = layout_status(resolve(spec, pool_of(spec)))
    return job_status(manifest, spec, layout, pool_of(spec), observed, NOW)


def _condition(status: GRPOJobStatus, kind: str) -> dict[str, Any]:
    return next(c.wire() for c in status.conditions if c.type == kind)


def test_a_straggler_degrades_the_job_which_stays_ready() -> None:
    status = _status(_observed(SLOW))
    degraded = _condition(status, "Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "Straggler")
    place = "rank 3 in pod tiny-moe-trainer-1 on node node-2"
    assert degraded["message"].startswith(
        f"{place} computes 2.1 times as long as its pipeline stage's median"
    )
    assert "for 7 steps" in degraded["message"]
    assert _condition(status, "Ready")["status"] == "True"
    assert status.stragglers is not None
    assert [one.wire() for one in status.stragglers] == [
        {"rank": 3, "pod": "tiny-moe-trainer-1", "node": "node-2", "ratio": "2.1", "steps": 7}
    ]


def test_without_one_there_is_neither_condition_nor_list() -> None:
    status = _status(_observed())
    assert _condition(status, "Degraded")["reason"] == "PoolsWhole" and status.stragglers is None


def test_a_gang_that_restarts_has_no_stragglers_in_its_reason() -> None:
    assert _condition(_status(_observed(SLOW, phase="Recovering")), "Degraded")["reason"] != "Straggler"


def test_many_stragglers_are_counted_and_few_named() -> None:
    many = [SLOW.updated(rank=rank) for rank in range(20)]
    status = _status(_observed(*many, count=50))
    assert status.stragglers is not None and len(status.stragglers) == MAX_STRAGGLERS
    message = _condition(status, "Degraded")["message"]
    assert message.count("rank ") == 3 and "47 more ranks are slow" in message and len(message) < 700


def _wire(observed: Observed) -> dict[str, Any]:
    return _status(observed).wire()


def test_each_new_straggler_is_one_event_that_names_its_node() -> None:
    calm, one = _wire(_observed()), _wire(_observed(SLOW))
    event = straggler_event(calm, one)
    assert event is not None and (event.reason, event.warning) == ("Straggler", True)
    assert event.message == (
        "slow ranks: rank 3 in pod tiny-moe-trainer-1 on node node-2 (2.1 times the median)"
    )
    assert job_event(calm, one) is None, "it has one event"
    assert straggler_event(one, _wire(_observed(SLOW.updated(ratio=3.0, steps=8)))) is None
    two = _wire(_observed(SLOW, SLOW.updated(rank=1, pod="tiny-moe-trainer-0")))
    event = straggler_event(one, two)
    assert event is not None and "rank 1 " in event.message and "rank 3 " not in event.message
    assert straggler_event(two, calm) is None


def test_an_older_controller_reports_none() -> None:
    status = ControllerStatus.model_validate({"phase": "Training", "step": 3})
    assert status.stragglers == [] and status.straggler_count == 0


def _slow_job(replace: bool) -> dict[str, Any]:
    manifest = job(restartPolicy={"stragglers": StragglerPolicy(replace=replace).wire()})
    return manifest | {"status": _wire(_observed(SLOW))}


def _trainer(number: int, created: str) -> dict[str, Any]:
    made = pod("trainer", number)
    made["metadata"]["creationTimestamp"] = created
    return made | {"spec": {"nodeName": f"n{number}"}}


def test_evidence_needs_the_field_and_a_pod_that_started_after_the_last_strike() -> None:
    pods = [_trainer(number, "2026-01-01T00:00:00Z") for number in range(2)]
    assert slow_nodes(_slow_job(False), pods, {}) == {} == slow_nodes(None, pods, {})
    (node, evidence), *others = slow_nodes(_slow_job(True), pods, {}).items()
    assert (node, evidence.reason, others) == ("n1", REASON, [])
    assert evidence.text == "rank 3 computes 2.1 times as long as its peers' median"
    struck = NodeRecord(strikes=(Strike(at=2e9, reason=REASON, text=""),))
    assert slow_nodes(_slow_job(True), pods, {"n1": struck}) == {}, "the pod is leaving"
