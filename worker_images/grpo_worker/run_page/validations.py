"""Scores of the validation sets with their confidence intervals, a bounded number of points (pure)."""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from grpo_worker.checkpointing.best import Best
from grpo_worker.run_page.buckets import Buckets
from grpo_worker.run_page.curves import Extremes, Point, extremes
from grpo_worker.run_page.limits import Limits

SCORE = "score"
_PASS = re.compile(r"pass@([1-9]\d{0,8})/mean")


def validations(records: Iterable[Mapping[str, Any]], kept: Best | None, limits: Limits) -> dict[str, Any]:
    """Return the curves of each set. ``records``: lines of ``validation.jsonl``.

    ``kept``: checkpoint that is kept as the best one; its point is never left out.
    """
    sets: dict[str, _Set] = {}
    left_out: set[str] = set()
    last = -1
    for record in records:
        last, name = max(last, record["step"]), str(record["set"])
        if name not in sets and len(sets) == limits.sets:
            left_out.add(name)
            continue
        if name not in sets:
            sets[name] = _Set(limits, kept.step if kept is not None and kept.set == name else None)
        sets[name].add(record)
    width = max((one.width for one in sets.values()), default=1)
    return {
        "sets": [{"name": name, "curves": one.curves(width)} for name, one in sets.items()],
        "last": last,
        "width": width,
        "hidden": len(left_out),
        "kept": None if kept is None else {"step": kept.step, "set": kept.set},
    }


class _Set:
    """Curves of a set by the number of draws, ``k`` of pass@k; 0: the mean score."""

    def __init__(self, limits: Limits, kept: int | None) -> None:
        self._limits, self._kept = limits, kept
        self._curves: dict[int, Buckets[Extremes]] = {}
        self._kept_points: dict[int, Point] = {}

    def add(self, record: Mapping[str, Any]) -> None:
        """Add the figures of a version."""
        step = record["step"]
        for draws, name in _measures(record)[: self._limits.passes + 1]:
            mean, half = record[f"{name}/mean"], record.get(f"{name}/ci95", math.nan)
            if not (math.isfinite(mean) and math.isfinite(half)):
                continue
            point: Point = (step, mean, half)
            if draws not in self._curves and len(self._curves) <= self._limits.passes:
                self._curves[draws] = Buckets(self._limits.validations, extremes)
            if draws in self._curves:
                self._curves[draws].add(step, Extremes(point, point))
                if step == self._kept:
                    self._kept_points[draws] = point

    @property
    def width(self) -> int:
        """Return the steps of an interval."""
        return max((curve.width for curve in self._curves.values()), default=1)

    def curves(self, width: int) -> list[dict[str, Any]]:
        """Return name and points of each curve: step, mean, and half of its 95 % confidence interval."""
        found = []
        for draws, curve in sorted(self._curves.items()):
            curve.widen(width)
            points = {point for one in curve.values() for point in one.points()}
            if draws in self._kept_points:
                points.add(self._kept_points[draws])
            found.append({"name": _name(draws), "points": sorted(points)})
        return found


def _measures(record: Mapping[str, Any]) -> list[tuple[int, str]]:
    """Return the draws and the names of the measures in a record, the mean score first."""
    passes = [int(found[1]) for name in record if (found := _PASS.fullmatch(name))]
    score = [0] if f"{SCORE}/mean" in record else []
    return [(draws, _name(draws)) for draws in (*score, *sorted(passes))]


def _name(draws: int) -> str:
    return f"pass@{draws}" if draws else SCORE
