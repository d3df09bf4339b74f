"""Conditions that follow metav1.Condition and kstatus (pure)."""

from typing import Any, NamedTuple

from grpo_operator.api.v1alpha1.status import Condition


class Problem(NamedTuple):
    """Something that a condition must tell. ``reason`` is CamelCase; both are "" when there is none."""

    reason: str = ""
    message: str = ""


NO_PROBLEM = Problem()


class Conditions:
    """Builder of a condition list. A condition whose status did not change keeps its transition time."""

    def __init__(self, old: list[dict[str, Any]], generation: int, now: str) -> None:
        self._old = {c["type"]: c for c in old}
        self._generation = generation
        self._now = now
        self._new: list[Condition] = []

    def set(self, kind: str, value: bool, reason: str, message: str = "") -> None:
        """Add one condition. ``reason`` is CamelCase; ``message`` tells users what to do."""
        status = "True" if value else "False"
        before = self._old.get(kind)
        same = before is not None and before["status"] == status
        since = before["lastTransitionTime"] if before is not None and same else self._now
        self._new.append(
            Condition(
                type=kind,
                status=status,
                reason=reason,
                message=message[:4096],
                last_transition_time=since,
                observed_generation=self._generation,
            )
        )

    def result(self) -> list[Condition]:
        return self._new
