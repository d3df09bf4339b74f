"""Faults of a run as marks on the axis of its steps (pure)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_worker.run_page.buckets import Buckets
from grpo_worker.run_page.curves import not_finite, numbers
from grpo_worker.run_page.limits import Limits

# Metrics that count what went wrong, and what a mark says of them: in a step, and until a step.
IN_STEP = {
    "rollout/retries": "requests to engines ended early",
    "rollout/continued_samples": "samples continued on another engine",
    "rollout/refused_prompts": "prompts refused by engines",
}
UNTIL_STEP = {
    "weight_sync/link_failures": "direct transfers of weights failed",
    "reward/failures": "rewards failed",
    "recovery/checkpoint_put_off_steps": "checkpoints put off",
    "recovery/rollbacks": "rollbacks to an older checkpoint",
    "samples/missing_steps": "steps without samples in the store",
    "samples/missing_validations": "validations without samples in the store",
}
NOT_FINITE = "metrics that are not finite"
RESTART = "restart"
_LONGEST = 300  # characters of a text


@dataclass(frozen=True, slots=True)
class Mark:
    """Faults of a kind in an interval of steps. ``step``: of the first, ``text``: of the latest."""

    step: int
    count: int
    text: str


class Faults:
    """Marks by kind; an interval of steps has one of each kind."""

    def __init__(self, limits: Limits, before: Mapping[str, Any]) -> None:
        """``before``: record of the step before the first one; {} if there is none."""
        self._limits = limits
        self._kinds: dict[str, Buckets[Mark]] = {}
        self._before = numbers(before)

    def add(self, step: int, record: Mapping[str, Any]) -> None:
        """Add what the record of a step counts."""
        values = numbers(record)
        for name, kind in IN_STEP.items():
            self._count(step, kind, values.get(name, 0))
        for name, kind in UNTIL_STEP.items():
            # Less than before: another controller counts from 0.
            self._count(step, kind, values.get(name, 0) - self._before.get(name, 0))
        self._before = values
        if names := not_finite(record):
            self._mark(NOT_FINITE, Mark(step, len(names), ", ".join(names)[:_LONGEST]))

    def add_recovery(self, line: Mapping[str, Any]) -> None:
        """Add a line of ``recoveries.jsonl``: a restart, at the step that it interrupted."""
        parts = ", ".join(f"{name} {seconds:g} s" for name, seconds in line["parts"].items())
        text = f"{line['at']}, {line['seconds']:g} s ({parts}) {line.get('why', '')}"
        self._mark(f"{RESTART}: {line['cause']}", Mark(line["step"], 1, text.strip()[:_LONGEST]))

    def kinds(self) -> list[dict[str, Any]]:
        """Return the kinds with their marks, restarts first."""
        ordered = sorted(self._kinds, key=lambda kind: (not kind.startswith(RESTART), kind))
        return [
            {
                "kind": kind,
                "restart": kind.startswith(RESTART),
                "marks": [[mark.step, mark.count, mark.text] for mark in self._kinds[kind].values()],
            }
            for kind in ordered
        ]

    def _count(self, step: int, kind: str, count: float) -> None:
        if count > 0:
            self._mark(kind, Mark(step, int(count), f"{int(count)} {kind}"))

    def _mark(self, kind: str, mark: Mark) -> None:
        if kind not in self._kinds:
            self._kinds[kind] = Buckets(self._limits.marks, _both)
        self._kinds[kind].add(mark.step, mark)


def _both(one: Mark, other: Mark) -> Mark:
    return Mark(min(one.step, other.step), one.count + other.count, other.text)
