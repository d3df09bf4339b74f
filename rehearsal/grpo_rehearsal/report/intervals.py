"""Arithmetic of intervals and step functions of time (pure)."""

from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def covered(intervals: Iterable[Interval], window: Interval) -> float:
    """Return the seconds of ``window`` that at least one interval covers."""
    total, end = 0.0, window[0]
    for begin, stop in sorted(intervals):
        first, last = max(begin, end), min(stop, window[1])
        if last > first:
            total += last - first
            end = last
    return total


def idle_share(intervals: Iterable[Interval], window: Interval) -> float:
    """Return the share of ``window`` that no interval covers; 0 for an empty window."""
    length = window[1] - window[0]
    return 1 - covered(intervals, window) / length if length > 0 else 0.0


def total_of(series: Sequence[Sequence[tuple[float, int]]]) -> list[tuple[float, int]]:
    """Return the sum of step functions, given as (time, value from then on), at each change."""
    changes = sorted((time, number, value) for number, steps in enumerate(series) for time, value in steps)
    now = [0] * len(series)
    result: list[tuple[float, int]] = []
    for time, number, value in changes:
        now[number] = value
        total = sum(now)
        if result and result[-1][0] == time:
            result.pop()
        result.append((time, total))
    return result


def integral(steps: Sequence[tuple[float, float]], window: Interval) -> float:
    """Return the integral of a step function over ``window``; it is 0 before its first step."""
    total = 0.0
    for number, (time, value) in enumerate(steps):
        until = steps[number + 1][0] if number + 1 < len(steps) else window[1]
        begin, end = max(time, window[0]), min(until, window[1])
        if end > begin:
            total += value * (end - begin)
    return total


def sampled(steps: Sequence[tuple[float, float]], window: Interval, count: int) -> list[tuple[float, float]]:
    """Return a step function's values at ``count`` equally distant times of ``window``."""
    values, place = [], 0
    for number in range(count):
        time = window[0] + (window[1] - window[0]) * number / max(count - 1, 1)
        while place + 1 < len(steps) and steps[place + 1][0] <= time:
            place += 1
        known = bool(steps) and steps[place][0] <= time
        values.append((round(time, 3), steps[place][1] if known else 0))
    return values
