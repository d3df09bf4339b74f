"""Detects, from the ranks' progress, that a call of the gang stands still (pure)."""

from collections.abc import Sequence
from dataclasses import dataclass

from grpo_worker.profiling.progress import Progress

POLLS_PER_LIMIT, LONGEST_POLL = 4, 15.0  # seconds


def poll_seconds(hang_seconds: float) -> float:
    """Return the time between two looks at the ranks.

    It is short against the minute in which a hang must be named, and rare enough for hundreds of ranks.
    """
    return min(hang_seconds / POLLS_PER_LIMIT, LONGEST_POLL)


@dataclass(frozen=True, slots=True)
class Standstill:
    """A call that hangs. ``silent``: ranks whose process does not answer; none: no rank moves."""

    seconds: float
    silent: tuple[int, ...] = ()


class ProgressWatch:
    """Progress of one call. Its duration has no limit: only time without progress counts."""

    def __init__(self, hang_seconds: float, ranks: int, now: float) -> None:
        self._hang = hang_seconds
        self._moved = now
        self._counts = [-1] * ranks
        self._heard = [now] * ranks

    def moved(self, now: float) -> None:
        """Record progress that nobody had to be asked for, such as the end of the call on one rank."""
        self._moved = now
        self._heard = [now] * len(self._heard)

    def observe(self, answers: Sequence[Progress | None], now: float) -> Standstill | None:
        """Record the progress of each rank, None if it did not answer; return what hangs, if anything."""
        allowance = 0.0
        for rank, answer in enumerate(answers):
            if answer is None:
                continue
            self._heard[rank] = now
            allowance = max(allowance, answer.allowance)
            if answer.count != self._counts[rank]:
                self._counts[rank], self._moved = answer.count, now
        silent = tuple(rank for rank, heard in enumerate(self._heard) if now - heard >= self._hang)
        if silent:
            return Standstill(max(now - self._heard[rank] for rank in silent), silent)
        still = now - self._moved
        return Standstill(still) if still >= self._hang + allowance else None
