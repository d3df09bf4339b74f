"""Failed containers appear in the status of job and pool with their last error."""

from typing import Any

import pytest

from grpo_operator.api.messages import AgentStatus, RecoveryReport
from grpo_operator.api.names import Owner
from grpo_operator.api.v1alpha1.rolloutpool import RolloutPoolSpec
from grpo_operator.api.v1alpha1.status import EngineState, GRPOJobStatus, LayoutStatus
from grpo_operator.kuberay_client.models import RayClusterStatus
from grpo_operator.observe.watched_kinds import reduced
from grpo_operator.plan.observed import Observed
from grpo_operator.plan.status.container_failures import container_failures, failing
from grpo_operator.plan.status.grpojob import job_status
from grpo_operator.plan.status.rolloutpool import pool_status
from support.objects import NOW, controller_status, job, pod, pool_of, running, spec_of

LAYOUT = LayoutStatus(
    world=2, data=1, tensor=2, pipeline=1, context=1, expert=2, expert_tensor=1, stages=[], reason="given"
)
CRASHED = {"exitCode": 1, "reason": "Error", "message": "noise\nAttributeError: no 'topk_method'\n"}


def _container(restarts: int = 2, **changes: Any) -> dict[str, Any]:
    waiting = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}}
    status = {"name": "engine", "ready": False, "restartCount": restarts, "state": waiting}
    return status | {"lastState": {"terminated": CRASHED}} | changes


@pytest.mark.fault(
    row="image-pull",
    point="a container waits with ErrImagePull",
    witness="the failure is named",
    partial="a status as data; no pod, no job",
)
@pytest.mark.parametrize(
    ("container", "expected"),
    [
        (_container(), ("Error, exit code 1", "AttributeError: no 'topk_method'", 2)),
        (
            _container(
                0, state={"waiting": {"reason": "ErrImagePull", "message": "not found"}}, lastState={}
            ),
            ("ErrImagePull", "not found", 0),
        ),
        (
            _container(state={"running": {}}, started=False),
            ("Error, exit code 1", "AttributeError: no 'topk_method'", 2),
        ),
        (_container(state={"running": {}}, started=True), None),
        (_container(state={"running": {}}, ready=True), None),
        (_container(0, state={"waiting": {"reason": "ContainerCreating"}}, lastState={}), None),
        (_container(state={"running": {}}, lastState={"terminated": {"exitCode": 0}}), None),
    ],
)
def test_failures_of_a_container_are_extracted(
    container: dict[str, Any], expected: tuple[str, str, int] | None
) -> None:
    found = [(f["reason"], f["error"], f["restarts"]) for f in failing({"containerStatuses": [container]})]
    assert found == ([expected] if expected else [])


def test_the_cache_keeps_only_failures() -> None:
    whole = pod("rollout", ready=False)
    whole["status"]["containerStatuses"] = [_container()]
    kept = reduced("pods", whole)
    assert [t.text for t in container_failures([kept])] == [
        "tiny-moe-rollout-0, container engine: Error, exit code 1 after 2 restarts: "
        "AttributeError: no 'topk_method'"
    ]
    assert "failing" not in reduced("pods", pod("rollout"))["status"]


def _crashing(number: int, restarts: int, message: str = "AttributeError: x") -> dict[str, Any]:
    found = pod("rollout", number, ready=False)
    container = _container(restarts, lastState={"terminated": CRASHED | {"message": message}})
    found["spec"] = {"nodeName": "node"}
    found["status"]["failing"] = failing({"containerStatuses": [container]})
    return found


def _status(observed: Observed, **old: Any) -> Any:
    manifest = job()
    if old:
        manifest["status"] = old
    return job_status(manifest, spec_of(manifest), LAYOUT, pool_of(spec_of(manifest)), observed, NOW)


def _condition(status: Any, kind: str) -> Any:
    return next(c for c in status.conditions if c.type == kind)


def _starting(*engines: dict[str, Any]) -> Observed:
    report = controller_status("Starting", message="sending the first weights", weight_version=None, step=0)
    pods = (pod("controller"), pod("trainer", 0), pod("trainer", 1), *engines)
    return Observed(RayClusterStatus(), pods, report)


def test_a_job_whose_engines_crash_is_degraded_and_says_why() -> None:
    status = _status(_starting(_crashing(0, 1), pod("rollout", 1, ready=False)))
    assert status.phase == "Starting"
    degraded = _condition(status, "Degraded")
    assert degraded.status == "True" and "AttributeError: x" in degraded.message
    assert "AttributeError: x" in _condition(status, "Ready").message


def test_a_job_fails_when_all_engines_fail_to_start_alike() -> None:
    same = _starting(_crashing(0, 3), _crashing(1, 4))
    status = _status(same)
    assert status.phase == "Failed"
    assert "no engine has started: tiny-moe-rollout-0" in _condition(status, "Failed").message
    assert _status(same, weightVersion=3, phase="Training").phase == "Starting", "they have served before"
    assert _status(_starting(_crashing(0, 3), _crashing(1, 2))).phase == "Starting"
    assert _status(_starting(_crashing(0, 3), _crashing(1, 3, "OSError: y"))).phase == "Starting"
    waiting = pod("rollout", 1, ready=False)
    assert _status(_starting(_crashing(0, 3), waiting)).phase == "Failed", "it has no node yet"
    waiting["spec"] = {"nodeName": "node"}
    assert _status(_starting(_crashing(0, 3), waiting)).phase == "Starting"


def test_one_crashing_engine_only_degrades_a_training_job() -> None:
    observed = running()
    observed.pods[-1]["status"] |= _crashing(1, 2)["status"]
    status = _status(observed, weightVersion=3, phase="Training")
    assert _condition(status, "Ready").status == "True"
    degraded = _condition(status, "Degraded")
    assert (degraded.status, degraded.reason) == ("True", "ContainersFailing")
    assert "AttributeError: x" in degraded.message


def test_a_restarted_controller_does_not_clear_the_status() -> None:
    report = {"attempt": 0, "step": 0, "weight_version": None, "reward_mean": None, "last_checkpoint": None}
    fresh = running("Starting", **report, restarts={"job": 0, "infrastructure": 0})
    status = _status(fresh, step=300, phase="Training", restarts={"job": 1, "infrastructure": 2})
    assert (status.phase, status.step, status.restarts.infrastructure) == ("Recovering", 300, 2)


def test_long_messages_of_agents_are_truncated() -> None:
    name = "tiny-moe-rollout-0"
    agents = {name: AgentStatus(name=name, state=EngineState.STALE, reason="x" * 5000)}
    observed = Observed(RayClusterStatus(), running().pods, controller_status("Training"), agents)
    assert len(observed.engines()[0].message or "") == 1024


def test_a_job_without_samples_is_not_ready() -> None:
    assert _condition(_status(running()), "Ready").status == "True"
    status = _status(running(stalled="no token arrived for 300 s: engine-0: HTTP 400"))
    assert status.phase == "Training"
    for kind, value in (("Ready", "False"), ("Degraded", "True")):
        found = _condition(status, kind)
        assert (found.status, found.reason) == (value, "NoSamples") and "HTTP 400" in found.message


def test_a_job_without_the_rdma_it_asks_for_trains_degraded() -> None:
    text = "NCCL uses sockets in trainer-0"
    status = _status(running(network="NCCL 2.30.7: network Socket (eth0)", network_problem=text))
    assert (status.phase, status.network) == ("Training", "NCCL 2.30.7: network Socket (eth0)")
    found = _condition(status, "Degraded")
    assert (found.status, found.reason) == ("True", "NoRdma") and text in found.message
    assert _condition(status, "Ready").status == "True"
    recovering = _status(running("Recovering", network_problem=text))
    assert _condition(recovering, "Degraded").reason != "NoRdma", "the gang of that network is gone"


def test_a_job_with_a_weak_sandbox_trains_degraded() -> None:
    text = "spec.reward.sandbox=bestEffort: the kernel offers no Landlock"
    status = _status(running(sandbox_problem=text))
    found = _condition(status, "Degraded")
    assert (found.status, found.reason) == ("True", "NoLandlock") and text in found.message
    assert _condition(status, "Ready").status == "True"
    slow = _status(running(sandbox_problem=text, network_problem="NCCL uses sockets"))
    assert _condition(slow, "Degraded").reason == "NoRdma"


def test_a_store_without_room_for_a_checkpoint_degrades_a_job_that_trains() -> None:
    text = "the checkpoint of step 40 is put off: checkpoint.store.pvc=runs has 1 GiB free of the 14 GiB"
    status = _status(running(checkpoint_problem=text, network_problem="NCCL uses sockets"))
    found = _condition(status, "Degraded")
    assert (status.phase, found.status, found.reason) == ("Training", "True", "StoreFull")
    assert text in found.message and _condition(status, "Ready").status == "True"


def test_parked_trainers_say_what_they_wait_for_and_since_when() -> None:
    text = "waiting since 2026-01-01T00:00:00Z: 0 of minAvailable=2 engines serve version 7: a RESTARTING"
    status = _status(running("Recovering", message=text, waiting=text, times_parked=1))
    assert (status.phase, status.times_parked, status.attempt) == ("Recovering", 1, 1)
    conditions = {condition.type: condition for condition in status.conditions}
    for kind, value in (("Ready", "False"), ("Degraded", "True")):
        found = conditions[kind]
        assert (found.status, found.reason) == (value, "Parked") and text in found.message
    assert conditions["Stalled"].status == conditions["Failed"].status == "False", (
        "nothing has to be corrected"
    )


def test_a_back_off_shows_the_next_attempt_and_the_reason() -> None:
    later = "2026-01-01T00:05:00Z"
    waiting = running(
        "Recovering",
        next_attempt=later,
        last_failure="rank 3 on trainer-0 does not respond",
        recent_failures=3,
        backoff_seconds=20,
    )
    status = _status(waiting)
    assert (status.next_attempt_at, status.last_failure) == (later, "rank 3 on trainer-0 does not respond")
    assert (status.recent_failures, status.backoff_seconds) == (3, 20)
    manifest = job() | {"status": status.wire()}
    again = GRPOJobStatus.model_validate(status.wire())
    assert again == status and manifest["status"]["nextAttemptAt"] == later


def test_the_last_recovery_is_shown_and_stays_when_the_next_controller_knows_of_none() -> None:
    parts = {"detect": "0.2", "stop": "1.1"}
    report = RecoveryReport(cause="infrastructure", step=8, seconds="1.3", parts=parts)
    status = _status(running("Training", last_recovery=report))
    assert status.last_recovery is not None
    assert status.last_recovery.wire() == report.wire()
    later = _status(running("Training"), **status.wire())
    assert later.last_recovery == status.last_recovery


def test_a_controller_that_cannot_begin_shows_its_back_off() -> None:
    later = "2026-01-01T00:05:00Z"
    report = {"attempt": 0, "next_attempt": later, "last_failure": "OSError: stale", "recent_failures": 2}
    status = _status(running("Starting", **report, restarts={"job": 0, "infrastructure": 2}))
    assert (status.next_attempt_at, status.last_failure, status.recent_failures) == (
        later, "OSError: stale", 2
    )  # fmt: skip


def test_tokens_and_rows_are_in_the_status() -> None:
    tokens = {"end": [5, 3], "pad": 3, "chatTemplate": True}
    status = _status(running(tokens=tokens, data={"rows": 70, "too_long": 3}))
    assert status.wire()["tokens"] == tokens
    assert status.data.rows == 70 and status.data.too_long == 3


def test_the_pool_names_the_last_error_of_an_engine() -> None:
    manifest = job()
    template = pool_of(spec_of(manifest)).wire()
    spec = RolloutPoolSpec.model_validate(template | {"model": manifest["spec"]["model"]})
    pool = {"metadata": {"generation": 1}}
    observed = _starting(_crashing(0, 2), pod("rollout", 1, ready=False))
    status = pool_status(pool, spec, Owner("GRPOJob", "default", "tiny-moe"), observed, None, NOW)
    assert status.engines[0].message and "AttributeError: x" in status.engines[0].message
    assert "AttributeError: x" in _condition(status, "Degraded").message


def test_pods_that_the_api_server_refuses_are_reported_without_their_changing_names() -> None:
    said = 'pods "tiny-moe-head-x7k2p" is forbidden: violates PodSecurity "restricted:latest": hostPath'
    failure = {"type": "ReplicaFailure", "status": "True", "message": f"FailedCreateHeadPod\n{said}"}
    refused = Observed(RayClusterStatus(conditions=[failure]))
    status = _status(refused)
    found = _condition(status, "Degraded")
    assert (status.phase, found.status, found.reason) == ("Starting", "True", "PodsRefused")
    expected = 'FailedCreateHeadPod: a pod is forbidden: violates PodSecurity "restricted:latest": hostPath'
    assert expected in found.message
    over = Observed(RayClusterStatus(conditions=[failure | {"status": "False"}]))
    assert _condition(_status(over), "Degraded").reason == "PoolsWhole"


def test_the_cache_keeps_what_the_scheduler_says_until_a_node_is_found() -> None:
    waiting, scheduled = pod("trainer"), pod("trainer")
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no room"}
    waiting["status"]["conditions"] = [condition]
    scheduled["status"]["conditions"] = [{"type": "PodScheduled", "status": "True"}]
    kept = [reduced("pods", each)["status"].get("unschedulable") for each in (waiting, scheduled)]
    assert kept == ["no room", None]
