"""When pods may exist, and how the status reports it."""

from typing import Any

import pytest

from grpo_operator.api.messages import ControllerStatus, RestoredState
from grpo_operator.api.v1alpha1.status import GRPOJobStatus, RestartCounts
from grpo_operator.kuberay_client.models import RayClusterStatus
from grpo_operator.plan.lifecycle import cluster_unwanted, pods_suspended, suspend_request
from grpo_operator.plan.observed import Observed
from grpo_operator.plan.planner.resolve import resolve
from grpo_operator.plan.planner.settled import with_layout
from grpo_operator.plan.status.grpojob import (
    job_status,
    layout_status,
    refused_status,
    settled_layout,
)
from grpo_operator.plan.status.remaining import remaining
from support.objects import NOW, controller_status, job, pod, pool_of, running, spec_of

LAYOUT = layout_status(resolve(spec_of(job()), pool_of(spec_of(job()))))


def test_a_running_job_keeps_its_pods_until_its_checkpoint_is_complete() -> None:
    assert not pods_suspended({}, False, running())
    assert not pods_suspended({}, True, running("Training"))
    assert not pods_suspended({}, True, running("Suspending"))
    assert pods_suspended({}, True, running("Suspended"))


def test_pods_are_suspended_at_once_without_a_controller() -> None:
    lost = Observed(RayClusterStatus(), (pod("trainer"),), None)
    assert pods_suspended({}, True, lost)
    assert not pods_suspended({}, False, lost)
    waiting = pod("controller")
    waiting["status"]["phase"] = "Pending"
    assert pods_suspended({}, True, Observed(RayClusterStatus(), (waiting, pod("trainer")), None))


def test_an_unresponsive_controller_does_not_count_as_gone() -> None:
    silent = Observed(RayClusterStatus(), (pod("controller"),), None)
    assert not pods_suspended({}, True, silent)


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_an_ended_job_gets_no_pods(phase: str) -> None:
    assert pods_suspended({"phase": phase}, False, Observed())
    assert not pods_suspended({"phase": phase}, False, running(), "None")
    assert pods_suspended({"phase": phase}, False, running(), "None", resuming=True)


def test_a_ray_cluster_is_deleted_on_cleanup_or_for_kueues_quota() -> None:
    ended = {"phase": "Succeeded"}
    assert cluster_unwanted(ended, "All", False, False) and not cluster_unwanted(
        ended, "Workers", True, False
    )
    assert cluster_unwanted({}, "Workers", True, queued=True)
    assert not cluster_unwanted({}, "Workers", False, queued=True)
    assert not cluster_unwanted({}, "Workers", True, queued=False)


def test_the_columns_of_kubectl_get_name_cause_pace_and_all_restarts() -> None:
    restarts = RestartCounts(job=1, infrastructure=2)
    status = _status(running(step=7, step_seconds=100.0, restarts=restarts), job(totalSteps=100))
    assert (status.reason, status.eta, status.restart_count) == (None, "2h35m", 3)
    lost = pod("trainer", 0)
    lost["status"] = {"phase": "Pending", "unschedulable": "0/2 nodes are available: 2 Insufficient cpu."}
    waiting = Observed(RayClusterStatus(), (lost, pod("trainer", 1) | {"status": lost["status"]}), None)
    status = _status(waiting)
    (degraded,) = [c for c in status.conditions if c.type == "Degraded"]
    assert (status.reason, status.eta) == ("Unschedulable", None)
    assert "and 1 more: 0/2 nodes are available" in degraded.message


@pytest.mark.parametrize(
    ("steps", "seconds", "text"),
    [(10, 3.0, "30s"), (10, 60.0, "10m"), (100, 90.0, "2h30m"), (1000, 800.0, "9d06h"), (0, 800.0, "0s")],
)
def test_the_remaining_time_is_that_of_the_missing_steps(steps: int, seconds: float, text: str) -> None:
    controller = ControllerStatus(step=5, step_seconds=seconds)
    assert remaining(5 + steps, controller) == text
    assert remaining(5 + steps, ControllerStatus(step=5)) is None


def test_a_queued_job_is_pending_until_kueue_starts_its_cluster() -> None:
    manifest = job(scheduling={"queueName": "team-a"})
    held = Observed(RayClusterStatus(state="suspended"), (), None)
    status = _status(held, manifest)
    assert status.phase == "Pending" and "queued in team-a" in status.conditions[0].message
    assert _true(status) == {"Progressing", "Reconciling"}
    assert _status(running(), manifest).phase == "Training"


def test_suspension_is_kept_while_kuberay_deletes_pods() -> None:
    condition = {"type": "RayClusterSuspending", "status": "True"}
    going = Observed(
        RayClusterStatus(conditions=[condition]), (pod("controller"),), controller_status("Training")
    )
    assert pods_suspended({}, True, going)


def test_the_controller_is_sent_only_changes() -> None:
    assert suspend_request(True, running()) is True
    assert suspend_request(True, running(suspend_requested=True)) is None
    assert suspend_request(False, running(suspend_requested=True)) is False
    assert suspend_request(True, Observed()) is None


def _status(observed: Observed, manifest: dict[str, Any] | None = None) -> GRPOJobStatus:
    manifest = manifest or job()
    return job_status(manifest, spec_of(manifest), LAYOUT, pool_of(spec_of(manifest)), observed, NOW)


def _true(status: GRPOJobStatus) -> set[str]:
    return {c.type for c in status.conditions if c.status == "True"}


def test_status_of_a_training_job() -> None:
    status = _status(running())
    assert status.phase == "Training" and status.progress == "7/120" and status.weights == "v7"
    assert status.reward_mean == "0.250" and status.train_ready == "2/2"
    assert status.last_checkpoint is not None and status.last_checkpoint.step == 5
    assert _true(status) == {"Ready", "Progressing"}


def test_a_missing_engine_is_degraded_not_failed() -> None:
    seen = running()
    fewer = Observed(seen.ray_cluster, seen.pods[:-1], seen.controller)
    assert _true(_status(fewer)) == {"Ready", "Progressing", "Degraded"}


def test_figures_survive_a_controller_that_restarts() -> None:
    manifest = job()
    manifest["status"] = _status(running()).wire()
    status = _status(Observed(RayClusterStatus(), (), None), manifest)
    assert status.phase == "Recovering" and status.step == 7 and status.weights == "v7"


def test_the_step_stays_until_another_controller_has_restored_one() -> None:
    manifest = job()
    manifest["status"] = _status(running()).wire()
    started = _status(running("Starting", step=0, attempt=2, restored=None), manifest)
    assert (started.phase, started.progress, started.attempt) == ("Recovering", "7/120", 2)
    restored = running("Starting", step=6, attempt=2, restored=RestoredState(step=6, source="memory"))
    assert _status(restored, manifest).progress == "6/120"


def test_an_ended_phase_is_latched() -> None:
    manifest = job()
    manifest["status"] = _status(running("Succeeded", step=120, message="120 steps done")).wire()
    status = _status(Observed(), manifest)
    assert status.phase == "Succeeded" and status.finished_at == NOW
    (condition,) = [c for c in status.conditions if c.type == "Succeeded"]
    assert condition.status == "True" and condition.message == "120 steps done"


def test_transition_times_move_only_with_the_status() -> None:
    manifest = job()
    manifest["status"] = _status(running()).wire()
    spec = spec_of(manifest)
    later = job_status(manifest, spec, LAYOUT, pool_of(spec), running(step=8), "2027-01-01T00:00:00Z")
    assert {c.last_transition_time for c in later.conditions} == {NOW}


def test_a_refused_job_is_stalled_and_says_why() -> None:
    status = refused_status(job(), "Infeasible", "spec.trainer.nodes=64: add nodes", NOW)
    (stalled,) = [c for c in status.conditions if c.type == "Stalled"]
    assert stalled.status == "True" and "add nodes" in stalled.message
    assert (status.phase, status.reason) == ("Invalid", "Infeasible")


def test_a_job_suspended_from_the_start_is_suspended() -> None:
    status = _status(Observed(), job(suspend=True))
    assert status.phase == "Suspended" and "Suspended" in _true(status)


def test_a_settled_layout_stays_and_reaches_the_ranks() -> None:
    manifest = job()
    manifest["status"] = {"layout": LAYOUT.wire()}
    settled = settled_layout(manifest)
    assert settled == LAYOUT and settled_layout(job()) is None
    sizes = with_layout(spec_of(job()), LAYOUT).trainer.parallelism
    assert (sizes.tensor, sizes.expert, sizes.auto) == (2, 2, False)
    assert sizes.layout(2) == LAYOUT.layout()


def test_a_resumed_job_that_waits_keeps_its_progress() -> None:
    manifest = job()
    manifest["status"] = _status(running()).wire()
    status = refused_status(manifest, "WaitingForCapacity", "no room", NOW, waits=True)
    assert (status.phase, status.reason) == ("Waiting", "WaitingForCapacity")
    assert status.layout == LAYOUT and status.step == 7
    assert status.last_checkpoint is not None and status.train_ready is None
    assert _true(status) == {"Reconciling"}
