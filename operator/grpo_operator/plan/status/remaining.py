"""Steps and time until a job ends (pure)."""

from typing import Any

from grpo_operator.api.messages import ControllerStatus
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.status import GRPOJobStatus, Phase
from grpo_operator.plan.lifecycle import TERMINAL
from grpo_operator.plan.status.events import Event

_KEPT = (Phase.TRAINING, *TERMINAL)  # phases in which the number is one that a controller has reported


def total_steps(
    spec: GRPOJobSpec, old: GRPOJobStatus, controller: ControllerStatus | None, resumes: bool
) -> int:
    """Return after how many steps the job ends, or has ended.

    A running controller follows ``spec.totalSteps`` between two steps, once kubelet has written its file
    again. ``resumes``: the job goes on after its end now.
    """
    if controller is not None and controller.attempt and controller.total_steps:
        return controller.total_steps
    return old.total_steps if old.total_steps and old.phase in _KEPT and not resumes else spec.total_steps


def total_steps_event(before: dict[str, Any], after: dict[str, Any]) -> Event | None:
    """Return the event of a running job that has taken over another number of steps."""
    old, new = before.get("totalSteps"), after.get("totalSteps")
    if None in (old, new) or old == new or before.get("phase") != Phase.TRAINING:
        return None
    return Event("TotalStepsChanged", f"the job ends after step {new} (before: {old})", False)


def remaining(total_steps: int, controller: ControllerStatus | None) -> str | None:
    """Return the time that the missing steps take at the pace of the last one, as in ``2h05m``."""
    if controller is None or controller.step_seconds is None:
        return None
    seconds = max(total_steps - controller.step, 0) * controller.step_seconds
    if seconds < 60:
        return f"{seconds:.0f}s"
    minutes = round(seconds / 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02}h"
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m"
