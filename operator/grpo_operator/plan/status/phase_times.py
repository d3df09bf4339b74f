"""Time of a job in its phase without progress, and the limit of that time (pure)."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from grpo_operator.api.messages import ControllerStatus
from grpo_operator.api.v1alpha1.restart_policy import HANG_SECONDS
from grpo_operator.api.v1alpha1.status import PARKED, GRPOJobStatus, Phase

# In these a job has pods. Before them it waits for other objects, and their size does not matter.
AT_WORK = (Phase.STARTING, Phase.TRAINING, Phase.RECOVERING, PARKED, Phase.SUSPENDING)
_START_ENGINES = (Phase.STARTING, Phase.RECOVERING, PARKED)
_HANGS = 2  # the first one is noticed after hangSeconds, and the next attempt needs its time
_STEPS = 3  # times the duration of the last step


def progressed_at(old: GRPOJobStatus, phase: Phase, step: int | None, now: str) -> str:
    """Return when the job entered its phase, or its finished steps changed in it."""
    same = (old.phase, old.step) == (phase, step)
    return (old.progressed_at if same else None) or now


def parked_since(
    old: GRPOJobStatus, phase: Phase, controller: ControllerStatus | None, now: str
) -> str | None:
    """Return since when the trainers are parked; None if they are not."""
    parked = phase in (Phase.STARTING, Phase.TRAINING, Phase.RECOVERING) and controller and controller.waiting
    return (old.parked_since or now) if parked else None


def phase_of(status: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return the phase in the status of a job, or PARKED, and since when it makes no progress in it."""
    if status.get("parkedSince"):
        return PARKED, str(status["parkedSince"])
    return str(status.get("phase") or Phase.PENDING), status.get("progressedAt")


def phase_limit(
    phase: str, job: Mapping[str, Any], pool: Mapping[str, Any], least: Mapping[str, float]
) -> float | None:
    """Return the seconds after which a phase without progress is too long; None: it may last.

    ``pool``: spec of the rollout pool. ``least``: limits of the chart by phase; none and 0 mean no limit. A
    job at work has a longer one if its own deadlines or steps are long.
    """
    seconds = least.get(phase) or 0.0
    if not seconds or phase not in AT_WORK:
        return seconds or None
    spec, status = job.get("spec") or {}, job.get("status") or {}
    planned = (status.get("layout") or {}).get("deadlines") or {}
    hang = (spec.get("restartPolicy") or {}).get("hangSeconds") or planned.get("hangSeconds") or HANG_SECONDS
    start = (pool.get("engine") or {}).get("startSeconds") or 0 if phase in _START_ENGINES else 0
    return max(seconds, _HANGS * float(hang), float(start), _STEPS * float(status.get("stepSeconds") or 0))


def age(time: str, now: float) -> float:
    """Return the seconds from ``time`` (RFC 3339) until ``now`` (seconds since 1970), at least 0."""
    return max(now - datetime.fromisoformat(time).timestamp(), 0.0)
