"""Derives a Kubernetes event from two successive statuses (pure): at most one for each change."""

from typing import Any, NamedTuple

from grpo_operator.api.v1alpha1.status import Phase

_STRAGGLER = "Straggler"  # reason of Degraded that has an event of its own
_NO_RDMA = "NoRdma"  # reason of Degraded: NCCL uses sockets where the spec asks for RDMA


class Event(NamedTuple):
    """A Kubernetes event. ``reason`` is CamelCase, as in conditions; ``warning``: event type Warning."""

    reason: str
    message: str
    warning: bool


def job_event(before: dict[str, Any], after: dict[str, Any]) -> Event | None:
    """Return the event for a GRPOJob's new status.

    That of a resumption, else of a restart, else of a new phase, else of a condition.
    """
    resumption = _resumption_event(before.get("resumption") or {}, after.get("resumption") or {})
    if resumption is not None:
        return resumption
    old, new = before.get("restarts") or {}, after.get("restarts") or {}
    for cause, count in new.items():
        if count > old.get(cause, 0):
            message = _message(after, "Progressing")
            if cause == "rollback":
                return Event("TrainingRolledBack", f"rollback {count}: {message}", True)
            return Event("TrainingRestarted", f"restart {count} caused by the {cause}: {message}", True)
    phase = after.get("phase")
    if phase != before.get("phase"):
        trouble = phase in (Phase.FAILED, Phase.RECOVERING) or bool(_message(after, "Stalled"))
        return Event(str(phase), _first_message(after) or str(phase), trouble)
    return _condition_event(before, after)


def _resumption_event(before: dict[str, Any], after: dict[str, Any]) -> Event | None:
    message = str(after.get("message", ""))
    if after.get("times", 0) > before.get("times", 0):
        return Event("Resumed", message, False)
    asked = after.get("request") != before.get("request")
    return Event("ResumeRefused", message, True) if asked and message else None


def pool_event(before: dict[str, Any], after: dict[str, Any]) -> Event | None:
    """Return the event for a RolloutPool's new status."""
    writer = after.get("boundTo")
    if writer != before.get("boundTo"):
        text = f"weights come from GRPOJob {writer}" if writer else "no job writes to this pool"
        return Event("Bound" if writer else "Released", text, False)
    return _condition_event(before, after)


def _condition_event(before: dict[str, Any], after: dict[str, Any]) -> Event | None:
    for kind in ("Stalled", "Degraded"):
        message, earlier = _message(after, kind), _message(before, kind)
        if _reason(after, kind) == _STRAGGLER:
            continue
        if message and message != earlier and (kind == "Stalled" or not earlier or _slow(before, after)):
            return Event(_reason(after, kind), message, True)
    return None


def _slow(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Return whether a job that was degraded by other causes has become one that lacks RDMA."""
    return _reason(after, "Degraded") == _NO_RDMA != _reason(before, "Degraded")


def _first_message(status: dict[str, Any]) -> str:
    return _message(status, "Stalled") or next((c["message"] for c in status.get("conditions") or []), "")


def _true(status: dict[str, Any], kind: str) -> dict[str, Any]:
    matching = (c for c in status.get("conditions") or [] if c["type"] == kind and c["status"] == "True")
    return next(matching, {})


def _message(status: dict[str, Any], kind: str) -> str:
    """Return the message of a condition if it is true, else ""."""
    return str(_true(status, kind).get("message", ""))


def _reason(status: dict[str, Any], kind: str) -> str:
    return str(_true(status, kind).get("reason", kind))
