"""Steps of the deletion of a job whose folder in the store is removed with it."""

from datetime import UTC, datetime
from typing import Any

import pytest

from grpo_operator.api.names import STORE_FINALIZER
from grpo_operator.observe.watched_kinds import reduced
from grpo_operator.plan.status.conditions import Problem
from grpo_operator.plan.store_removal import (
    RETRY_SECONDS,
    Step,
    awaited_children,
    changed_finalizers,
    deletes_store,
    is_held,
    next_step,
    removal_event,
    removal_status,
    split,
    state_of,
)
from support.objects import NOW, job, pod

START = datetime.fromisoformat(NOW).astimezone(UTC).timestamp()


def _job(policy: str | None = "Delete", finalizers: list[str] | None = None, **status: Any) -> dict[str, Any]:
    made = job()
    if policy:
        made["spec"]["checkpoint"] = made["spec"]["checkpoint"] | {"deletionPolicy": policy}
    if finalizers is not None:
        made["metadata"]["finalizers"] = finalizers
    return made | ({"status": status} if status else {})


def _remover(phase: str = "Running", deleting: bool = False, **status: Any) -> dict[str, Any]:
    made = pod("store-removal", deleting=deleting)
    made["metadata"]["creationTimestamp"] = NOW
    made["status"] = {"phase": phase} | status
    return made


OTHER = "example.com/backup"


@pytest.mark.parametrize(
    ("given", "starts", "wanted"),
    [
        (_job("Delete"), True, [STORE_FINALIZER]),
        (_job("Delete", [OTHER]), True, [OTHER, STORE_FINALIZER]),
        (_job("Delete"), False, None),  # it has no pods yet, so it has no folder
        (_job("Delete", phase="Training"), False, [STORE_FINALIZER]),
        (_job("Delete", [STORE_FINALIZER], phase="Training"), False, None),
        (_job("Retain", [OTHER, STORE_FINALIZER], phase="Succeeded"), False, [OTHER]),
        (_job("Retain", [OTHER], phase="Training"), True, None),
        (_job(None), True, None),
    ],
)
def test_only_a_job_that_may_have_a_folder_is_held(
    given: dict[str, Any], starts: bool, wanted: list[str] | None
) -> None:
    assert changed_finalizers(given, starts) == wanted


def test_the_default_removes_nothing() -> None:
    assert not deletes_store(job()) and not is_held(job())
    assert deletes_store(_job()) and is_held(_job(finalizers=[OTHER, STORE_FINALIZER]))


@pytest.mark.parametrize(
    ("writers", "remover", "after", "step"),
    [
        (True, None, 0, Step.WAIT),
        (False, None, 0, Step.START),
        (False, _remover("Pending"), 3600, Step.WAIT),
        (False, _remover("Running"), 3600, Step.WAIT),
        (False, _remover("Succeeded"), 0, Step.FINISH),
        (True, _remover("Succeeded"), 0, Step.DISCARD),  # a late pod may have written something since
        (True, _remover("Running"), 0, Step.DISCARD),
        (False, _remover("Succeeded", deleting=True), 0, Step.WAIT),
        (False, _remover("Failed"), RETRY_SECONDS - 1, Step.WAIT),
        (False, _remover("Failed"), RETRY_SECONDS, Step.DISCARD),
        (False, _remover("Failed", deleting=True), 3600, Step.WAIT),
    ],
)
def test_the_folder_is_removed_when_nothing_writes_any_more(
    writers: bool, remover: dict[str, Any] | None, after: float, step: Step
) -> None:
    assert next_step(["pod tiny-moe-trainer-0"] if writers else [], remover, START + after) is step


@pytest.mark.parametrize(
    ("finalizer", "waits"), [("foregroundDeletion", True), ("orphan", True), (OTHER, False)]
)
def test_the_garbage_collector_comes_first(finalizer: str, waits: bool) -> None:
    """Else it deletes the pod that removes the folder, too, or nobody deletes that after the job."""
    writers = awaited_children(_job(finalizers=[STORE_FINALIZER, finalizer]))
    assert next_step(writers, None, START) is (Step.WAIT if waits else Step.START)


def test_the_pod_that_removes_is_none_of_the_job() -> None:
    remover = _remover()
    own, found = split([pod("trainer"), remover, pod("head")])
    assert own == ["pod tiny-moe-trainer-0", "pod tiny-moe-head-0"]
    assert found is remover and split([pod("head")])[1] is None


def _crashing(message: str, restarts: int = 3) -> dict[str, Any]:
    """Return the remover as the cache keeps it, after its process has failed."""
    ended = {"terminated": {"exitCode": 1, "reason": "Error", "message": message}}
    status = {
        "name": "controller",
        "ready": False,
        "restartCount": restarts,
        "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s"}},
        "lastState": ended,
    }
    whole = _remover("Running", containerStatuses=[status])
    return reduced("pods", whole | {"spec": {}})


def test_the_message_says_what_is_in_the_way_and_the_way_out() -> None:
    reason, message = state_of([], _crashing("INFO\nx.pvc=y: z is not removed: PermissionError: [Errno 13]"))
    assert reason == "StoreRemovalFailed"
    assert "PermissionError: [Errno 13]: correct that, or set spec.checkpoint.deletionPolicy" in message
    assert "to Retain" in message
    unschedulable = {"type": "PodScheduled", "reason": "Unschedulable", "message": "no claim"}
    waiting = reduced("pods", _remover("Pending", conditions=[unschedulable | {"status": "False"}]))
    assert state_of([], waiting).message.startswith("no node for tiny-moe-store-removal-0: no claim: correct")
    assert state_of([], None, "quota").message.startswith("quota: correct that")


def test_the_message_says_what_is_waited_for() -> None:
    assert state_of([], _remover()).reason == "RemovingStore"
    writers = [*split([pod("trainer", number) for number in range(3)])[0], "RayCluster tiny-moe"]
    first = "RayCluster tiny-moe, pod tiny-moe-trainer-0, pod tiny-moe-trainer-1"
    wanted = Problem("PodsRemain", f"waiting for the end of {first} and 1 more")
    assert state_of(writers, _crashing("x")) == wanted


def test_the_status_keeps_what_the_job_has_reached() -> None:
    ready = {"type": "Ready", "status": "True", "reason": "Training", "lastTransitionTime": NOW}
    deleted = _job(phase="Training", step=7, conditions=[ready])
    for state in (state_of([], None), state_of([], _crashing("x"))):
        status = removal_status(deleted, state, NOW).wire()
        assert status["step"] == 7 and status["phase"] == "Training" and status["reason"] == state.reason
        assert [c["type"] for c in status["conditions"]] == ["Ready", "StoreRemoved"]
        assert status["conditions"][1]["message"] == state.message
        deleted["status"] = status


def test_each_cause_of_a_failure_is_one_event() -> None:
    def status(*given: Any) -> dict[str, Any]:
        return removal_status(_job(phase="Training"), state_of([], *given), NOW).wire()

    going, first, again = status(_remover()), status(_crashing("a 1", 3)), status(_crashing("a 1", 4))
    event = removal_event(going, first)
    assert event is not None and event.reason == "StoreRemovalFailed" and event.warning
    assert removal_event(first, again) is None, "only the count has changed"
    assert removal_event(first, status(None, "quota")) is not None
    assert removal_event(first, going) is None and removal_event({}, going) is None
