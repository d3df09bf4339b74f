"""Curves of all metrics with a bounded number of points (pure)."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from grpo_worker.run_page.buckets import Buckets
from grpo_worker.run_page.limits import Limits

# Shown first and large, in this order, as far as a job has them.
MAIN = (
    "critic/score/mean",
    "response_length/mean",
    "train/train_rollout_logprob_abs_diff",
    "actor/ppo_kl",
    "actor/kl_loss",
    "actor/entropy",
    "actor/grad_norm",
    "perf/throughput",
    "timing_s/step",
)
_NO_METRICS = ("step", "wall_time")
Point = tuple[int, float, *tuple[float, ...]]  # step, value, and what else belongs to the value


@dataclass(frozen=True, slots=True)
class Extremes:
    """The smallest and the largest value of an interval, each with its step; both are points of the run."""

    low: Point
    high: Point

    def points(self) -> list[Point]:
        """Return the points in the order of their steps; one if they are the same."""
        return sorted({self.low, self.high})


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite metrics of a step's record by name."""
    return {
        name: value
        for name, value in record.items()
        if name not in _NO_METRICS and _is_number(value) and math.isfinite(value)
    }


def not_finite(record: Mapping[str, Any]) -> list[str]:
    """Return the names of metrics that have no finite value."""
    return [name for name, value in record.items() if _is_number(value) and not math.isfinite(value)]


def chosen(names: Iterable[str], most: int) -> list[str]:
    """Return at most ``most`` names: the main ones first, then the others by name."""
    found = set(names)
    main = [name for name in MAIN if name in found]
    return [*main, *sorted(found.difference(main))][:most]


class Curves:
    """Curves of a run, whose records are added step by step.

    Where a run has more steps than ``limits.buckets``, every interval keeps its smallest and its largest
    value, so that no spike is lost. ``hidden``: metrics that are left out, because there are too many.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._curves: dict[str, Buckets[Extremes]] = {}
        self._left_out: set[str] = set()

    def add(self, step: int, record: Mapping[str, Any]) -> None:
        """Add the record of a step."""
        values = numbers(record)
        for name in chosen(values, self._limits.metrics):
            if name not in self._curves and len(self._curves) < self._limits.metrics:
                self._curves[name] = Buckets(self._limits.buckets, extremes)
            if name in self._curves:
                self._curves[name].add(step, Extremes((step, values[name]), (step, values[name])))
        self._left_out |= values.keys() - self._curves.keys()

    @property
    def hidden(self) -> int:
        """Return the number of metrics that are left out."""
        return len(self._left_out)

    @property
    def width(self) -> int:
        """Return the steps of an interval."""
        return max((curve.width for curve in self._curves.values()), default=1)

    def series(self) -> list[dict[str, Any]]:
        """Return name and points of every curve, all with intervals of the same width."""
        width = self.width
        for curve in self._curves.values():
            curve.widen(width)
        return [
            {"name": name, "points": [p for one in self._curves[name].values() for p in one.points()]}
            for name in chosen(self._curves, self._limits.metrics)
        ]


def extremes(one: Extremes, other: Extremes) -> Extremes:
    """Return the extremes of two intervals together."""
    return Extremes(
        min(one.low, other.low, key=lambda point: point[1]),
        max(one.high, other.high, key=lambda point: point[1]),
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
