"""Asks the jobs' own pods beside the reconcile loop, so that a silent pod never holds it up."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from grpo_operator.api.names import Owner
from grpo_operator.observe.cache import Cache
from grpo_operator.observe.pod_client import PodClient

log = logging.getLogger(__name__)
_LONGEST = 8.0  # seconds between two looks at a job none of whose pods answers


@dataclass(frozen=True, slots=True)
class Reports:
    """What a job's pods said last. ``progress``: the controller; ``agents``: by pod name."""

    progress: dict[str, Any] | None = None
    agents: dict[str, dict[str, Any]] = field(default_factory=dict)


class PodPoller:
    """One look at a job at a time; ``changed`` gets the job whose answers differ from the last."""

    def __init__(self, cache: Cache, probe: PodClient, changed: Callable[[Owner], None]) -> None:
        self._cache = cache
        self._probe = probe
        self._changed = changed
        self._reports: dict[Owner, Reports] = {}
        self._silent: dict[Owner, tuple[int, float]] = {}  # looks without an answer, time of the next
        self._running: dict[Owner, asyncio.Task[None]] = {}

    def reports(self, key: Owner) -> Reports:
        return self._reports.get(key, Reports())

    def start(self) -> None:
        """Begin a look at every job that is due and not being looked at; forget deleted jobs."""
        owners = set(self._cache.owners())
        for known in (self._reports, self._silent):
            for key in known.keys() - owners:
                del known[key]
        now = time.monotonic()
        for key in owners:
            due = self._silent.get(key, (0, now))[1] <= now
            wanted = key in self._reports or self._cache.pods_of(key)
            if wanted and due and key not in self._running:
                task = asyncio.create_task(self._look(key))
                self._running[key] = task
                task.add_done_callback(partial(self._done, key))

    def _done(self, key: Owner, task: asyncio.Task[None]) -> None:
        self._running.pop(key, None)
        if not task.cancelled() and task.exception():
            log.error("looking at %s %s/%s", *key, exc_info=task.exception())

    async def _look(self, key: Owner) -> None:
        pods = self._cache.pods_of(key)
        progress, agents = await asyncio.gather(self._probe.progress(pods), self._probe.agents(pods))
        if progress is None and not agents:
            looks = self._silent.get(key, (0, 0.0))[0] + 1
            self._silent[key] = (looks, time.monotonic() + min(2.0**looks / 2, _LONGEST))
        else:
            self._silent.pop(key, None)
        fresh = Reports(progress, agents)
        if fresh != self._reports.get(key, Reports()):
            if fresh == Reports():
                del self._reports[key]
            else:
                self._reports[key] = fresh
            self._changed(key)

    def stop(self) -> None:
        for task in self._running.values():
            task.cancel()
