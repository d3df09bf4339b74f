"""The controller's client of the engines, which notes how long the controller waits for tokens."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from grpo_rehearsal.timed_pool import PoolWaits, WatchedTable
from grpo_rehearsal.virtual.scheduler import Scheduler
from grpo_worker.rollout.client import RolloutClient
from grpo_worker.rollout.routing import EngineTable
from grpo_worker.rollout.sample_watch import SampleWatch


class TimedClient(RolloutClient):
    """The client of a rehearsed job. ``waits``: how long the controller has waited for tokens."""

    def __init__(self, table: EngineTable, scheduler: Scheduler, waits: PoolWaits, **options: Any) -> None:
        """``options``: those of RolloutClient."""
        watch = TimedWatch(scheduler, waits)
        super().__init__(WatchedTable(table, scheduler, waits), watch=watch, **options)


class TimedWatch(SampleWatch):
    """The watch of a rehearsed job, which notes the longest time without a token."""

    def __init__(self, scheduler: Scheduler, waits: PoolWaits) -> None:
        super().__init__(lambda: scheduler.now)
        self._waits = waits

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Do what the watch does, and note the time without a token until the end."""
        with super().waiting():
            try:
                yield
            finally:
                self._note()

    def moved(self) -> None:
        """Do what the watch does, and note the time without a token until now."""
        self._note()
        super().moved()

    def _note(self) -> None:
        self._waits.tokenless = max(self._waits.tokenless, self._clock() - self._since)
