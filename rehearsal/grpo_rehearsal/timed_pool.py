"""The controller's pool of engines, which notes how long the controller waits under the pool's limits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grpo_operator.api.job_config import JobConfig
from grpo_rehearsal.virtual.scheduler import Scheduler
from grpo_worker.rollout.dispatcher import POLL_SECONDS
from grpo_worker.rollout.engine_pool import RolloutPool, Target
from grpo_worker.rollout.routing import EngineEntry, EngineTable


@dataclass(slots=True)
class PoolWaits:
    """Longest waits in seconds.

    ``served``: for ``minAvailable`` engines to serve a version, while none is updated to it for the first
    time. ``turned``: for engines to hold or release memory of shared GPUs. ``unserved``: of samples, while no
    engine serves their version. ``tokenless``: for the next token from any engine, while samples are awaited.
    """

    served: float = 0.0
    turned: float = 0.0
    unserved: float = 0.0
    tokenless: float = 0.0


class TimedPool(RolloutPool):
    """The pool of a rehearsed job. ``waits``: how long the controller has waited for it."""

    def __init__(self, config: JobConfig, scheduler: Scheduler, waits: PoolWaits) -> None:
        super().__init__(
            config.rollout_service, config.min_available, config.engines, config.writer, config.fp8
        )
        self.waits = waits
        self._scheduler = scheduler
        self._waits_for: int | None = None  # version
        self._since = 0.0  # the last update ended

    def serve(self, target: Target, timeout: float) -> dict[str, float]:
        """Do what the pool does, and note the longest wait for an engine that nobody updates."""
        self._waits_for, self._since = target.version, self._scheduler.now
        try:
            return super().serve(target, timeout)
        finally:
            if self._waits_for == target.version:
                self._waits_for = None

    def serves(self, version: int) -> bool:
        """Return whether ``minAvailable`` engines already serve the version."""
        served, now = super().serves(version), self._scheduler.now
        if self._first_updates():
            self._since = now
        elif version == self._waits_for:
            self.waits.served = max(self.waits.served, now - self._since)
        return served

    def turn(self, parts: Sequence[str], timeout: float) -> None:
        """Do what the pool does, and note the seconds."""
        began = self._scheduler.now
        try:
            super().turn(parts, timeout)
        finally:
            self.waits.turned = max(self.waits.turned, self._scheduler.now - began)

    def _sync(self, engine: EngineEntry, target: Target) -> dict[str, Any] | None:
        try:
            return super()._sync(engine, target)
        finally:
            self._since = self._scheduler.now


class WatchedTable(EngineTable):
    """The table as the client of the engines reads it, which notes how long a version has no engine.

    It has no entries of its own, so a method that is missing here fails instead of seeing an empty pool.
    """

    def __init__(self, table: EngineTable, scheduler: Scheduler, waits: PoolWaits) -> None:
        self._table, self._scheduler, self._waits = table, scheduler, waits
        self._unserved: dict[int, tuple[float, float]] = {}  # version -> since when, last look

    def serving(self, version: int, newer: bool = False) -> list[EngineEntry]:
        """Return the engines on which a sample of ``version`` may run."""
        found, now = self._table.serving(version, newer), self._scheduler.now
        since, last = self._unserved.pop(version, (now, now))
        if not found:
            if now - last > 2 * POLL_SECONDS:  # no sample has waited in between
                since = now
            self._unserved[version] = since, now
            self._waits.unserved = max(self._waits.unserved, now - since)
        return found

    def entries(self) -> list[EngineEntry]:
        """Return all entries, ordered by name."""
        return self._table.entries()

    def entry(self, name: str) -> EngineEntry | None:
        """Return the entry of an engine; None if it is not in the pool."""
        return self._table.entry(name)

    def suspect(self, name: str, reason: str) -> None:
        """Stop routing to an engine until its agent reports a new state."""
        self._table.suspect(name, reason)

    def trust(self, entry: EngineEntry, reason: str) -> None:
        """Route to an engine again that was suspected for ``reason``, if no other state came since."""
        self._table.trust(entry, reason)
