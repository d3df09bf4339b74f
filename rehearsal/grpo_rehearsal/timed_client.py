"""The controller's client of the engines, which notes how long the controller waits for samples."""

from concurrent.futures import Future
from typing import Any

from grpo_rehearsal.timed_pool import PoolWaits, WatchedTable
from grpo_rehearsal.virtual.scheduler import Scheduler
from grpo_worker.data.prompts import Prompt
from grpo_worker.rollout.client import RolloutClient
from grpo_worker.rollout.generator import Arrived
from grpo_worker.rollout.routing import EngineTable
from grpo_worker.rollout.sampling import Sample


class TimedClient(RolloutClient):
    """The client of a rehearsed job. ``waits``: how long the controller has waited for its samples."""

    def __init__(self, table: EngineTable, scheduler: Scheduler, waits: PoolWaits, **options: Any) -> None:
        """``options``: those of RolloutClient."""
        super().__init__(WatchedTable(table, scheduler, waits), **options)
        self.waits = waits
        self._scheduler = scheduler
        self._awaited = 0  # groups
        self._since = 0.0  # a group was accepted, or the first one was awaited

    def submit(self, prompt: Prompt, version: int, arrived: Arrived | None = None) -> "Future[list[Sample]]":
        """Do what the client does, and note when the group is accepted."""
        if not self._awaited:
            self._since = self._scheduler.now
        self._awaited += 1
        group = super().submit(prompt, version, arrived)
        group.add_done_callback(self._ended)
        return group

    def _ended(self, group: "Future[list[Sample]]") -> None:
        self._awaited -= 1
        now = self._scheduler.now
        self.waits.accepted = max(self.waits.accepted, now - self._since)
        if not group.cancelled() and group.exception() is None:
            self._since = now
