"""Polls the jobs' own pods beside the reconcile loop, so that a slow pod never blocks a reconcile."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from grpo_operator.api.messages import AgentStatus, ControllerStatus
from grpo_operator.api.names import Owner
from grpo_operator.observe.cache import Cache
from grpo_operator.observe.pod_client import Controllers, PodClient

log = logging.getLogger(__name__)
_MAX_BACKOFF = 8.0  # seconds between two polls of an owner none of whose pods answers


@dataclass(frozen=True, slots=True)
class Reports:
    """Latest answers of an owner's pods. ``agents``: by pod name. ``superseded``: see Controllers."""

    controller: ControllerStatus | None = None
    agents: dict[str, AgentStatus] = field(default_factory=dict)
    superseded: frozenset[str] = frozenset()


class PodPoller:
    """Polls each owner at most once at a time, and calls ``changed`` with owners whose answers changed."""

    def __init__(self, cache: Cache, client: PodClient, changed: Callable[[Owner], None]) -> None:
        self._cache = cache
        self._client = client
        self._changed = changed
        self._reports: dict[Owner, Reports] = {}
        self._backoff: dict[Owner, tuple[int, float]] = {}  # polls without an answer, time of the next poll
        self._running: dict[Owner, asyncio.Task[None]] = {}

    def reports(self, owner: Owner) -> Reports:
        """Return the latest answers; empty when no pod of the owner answers."""
        return self._reports.get(owner, Reports())

    def start(self) -> None:
        """Start a poll for every owner that is due and has none running; forget deleted owners."""
        owners = set(self._cache.owners())
        for table in (self._reports, self._backoff):
            for owner in table.keys() - owners:
                del table[owner]
        now = time.monotonic()
        for owner in owners:
            due = self._backoff.get(owner, (0, now))[1] <= now
            has_pods = owner in self._reports or self._cache.pods_of(owner)
            if has_pods and due and owner not in self._running:
                task = asyncio.create_task(self._poll(owner))
                self._running[owner] = task
                task.add_done_callback(partial(self._done, owner))

    def _done(self, owner: Owner, task: asyncio.Task[None]) -> None:
        self._running.pop(owner, None)
        if not task.cancelled() and task.exception():
            log.error("polling the pods of %s %s/%s failed", *owner, exc_info=task.exception())

    async def _poll(self, owner: Owner) -> None:
        pods = self._cache.pods_of(owner)
        found, agents = await asyncio.gather(self._client.controllers(pods), self._client.agents(pods))
        if found == Controllers() and not agents:
            polls = self._backoff.get(owner, (0, 0.0))[0] + 1
            self._backoff[owner] = (polls, time.monotonic() + min(2.0**polls / 2, _MAX_BACKOFF))
        else:
            self._backoff.pop(owner, None)
        latest = Reports(found.status, agents, found.superseded)
        if latest != self._reports.get(owner, Reports()):
            if latest == Reports():
                del self._reports[owner]
            else:
                self._reports[owner] = latest
            self._changed(owner)

    def stop(self) -> None:
        """Cancel all running polls."""
        for task in self._running.values():
            task.cancel()
