"""Status of a job's checkpoints, from its controller's report (pure)."""

from typing import Any

from grpo_operator.api.base import LONGEST_MESSAGE
from grpo_operator.api.messages import ControllerStatus
from grpo_operator.api.v1alpha1.checkpoint_status import CheckpointStatus, MemoryCopiesStatus
from grpo_operator.api.v1alpha1.status import GRPOJobStatus
from grpo_operator.plan.status.conditions import Problem

_FAILURES = 2  # a pod that is replaced at that moment fails one copy


def checkpoint_statuses(old: GRPOJobStatus, controller: ControllerStatus, now: str) -> dict[str, Any]:
    """Return the status fields of checkpoints that the controller knows."""
    values: dict[str, Any] = {}
    if controller.last_checkpoint is not None:
        values["last_checkpoint"] = _newest(old, controller.last_checkpoint, controller, now)
    copies = controller.memory_copies
    if copies is not None:
        message = copies.problem[:LONGEST_MESSAGE] or None
        values["memory_copies"] = MemoryCopiesStatus(
            step=copies.step, failures=copies.failures, message=message
        )
    return values


def copies_problem(controller: ControllerStatus) -> Problem:
    """Return why copies in the pods' memory fail, if that has happened again and again."""
    copies = controller.memory_copies
    failing = copies is not None and copies.failures >= _FAILURES
    return Problem("MemoryCopiesFail", copies.problem if copies is not None and failing else "")


def _newest(old: GRPOJobStatus, step: int, controller: ControllerStatus, now: str) -> CheckpointStatus:
    """Return the newest checkpoint. A controller that has found it does not know when it was complete."""
    known, location = old.last_checkpoint, controller.checkpoint_location
    same = known is not None and (known.step, known.location) == (step, location)
    before = known.completed_at if known is not None and same else None
    at = controller.checkpoint_time or before or now
    return CheckpointStatus(step=step, location=location, complete=True, completed_at=at)
