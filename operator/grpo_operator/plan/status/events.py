"""Derives a Kubernetes event from two successive statuses (pure): at most one for each change."""

from typing import Any, NamedTuple

from grpo_operator.api.v1alpha1.status import Phase


class Event(NamedTuple):
    """A Kubernetes event. ``reason`` is CamelCase, as in conditions; ``warning``: event type Warning."""

    reason: str
    message: str
    warning: bool


def job_event(before: dict[str, Any], after: dict[str, Any]) -> Event | None:
    """Return the event for a GRPOJob's new status: a restart, else a new phase, else a condition."""
    old, new = before.get("restarts") or {}, after.get("restarts") or {}
    for cause, count in new.items():
        if count > old.get(cause, 0):
            text = f"restart {count} caused by the {cause}: {_message(after, 'Progressing')}"
            return Event("TrainingRestarted", text, True)
    phase = after.get("phase")
    if phase != before.get("phase"):
        trouble = phase in (Phase.FAILED, Phase.RECOVERING) or bool(_message(after, "Stalled"))
        return Event(str(phase), _first_message(after) or str(phase), trouble)
    return _condition_event(before, after)


def pool_event(before: dict[str, Any], after: dict[str, Any]) -> Event | None:
    """Return the event for a RolloutPool's new status."""
    writer = after.get("boundTo")
    if writer != before.get("boundTo"):
        text = f"weights come from GRPOJob {writer}" if writer else "no job writes to this pool"
        return Event("Bound" if writer else "Released", text, False)
    return _condition_event(before, after)


def _condition_event(before: dict[str, Any], after: dict[str, Any]) -> Event | None:
    for kind in ("Stalled", "Degraded"):
        message = _message(after, kind)
        if (
            message
            and message != _message(before, kind)
            and (kind == "Stalled" or not _message(before, kind))
        ):
            return Event(_reason(after, kind), message, True)
    return None


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
