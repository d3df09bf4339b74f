"""One task for each owner that is reconciled: an owner that hangs delays only its namespace."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Protocol

from grpo_operator.api.names import Owner
from grpo_operator.handlers.metrics import RECONCILE_SECONDS, RECONCILES
from grpo_operator.handlers.workqueue import WorkQueue
from grpo_operator.observe.cache import Cache

log = logging.getLogger(__name__)
Reconcile = Callable[[Any], Awaitable[None]]  # called with the object of the owner


class Admissions(Protocol):
    """Part of the admission that the loop uses."""

    def update(self) -> None: ...
    def started(self, owner: Owner) -> None: ...
    def ended(self, owner: Owner) -> None: ...


class OwnerTasks:
    """Starts the tasks that the work queue allows. ``reconcilers``: by kind of the owner."""

    def __init__(
        self, cache: Cache, work: WorkQueue, admissions: Admissions, reconcilers: Mapping[str, Reconcile],
        now: Callable[[], float],
    ) -> None:  # fmt: skip
        self._cache, self._work, self._admissions = cache, work, admissions
        self._reconcilers, self._now = reconcilers, now
        self._tasks: set[asyncio.Task[None]] = set()
        self.on_done: Callable[[], None] = lambda: None  # called after each reconcile

    def start(self) -> None:
        """Start tasks until no owner is ready or no place is free."""
        while (key := self._work.start(self._now())) is not None:
            owner = Owner(*key)
            task = asyncio.create_task(self._reconcile(owner))
            self._tasks.add(task)
            task.add_done_callback(partial(self._done, owner))

    async def cancel(self) -> None:
        """Cancel the tasks that run, and wait for their end."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _reconcile(self, owner: Owner) -> None:
        obj = self._cache.owner(owner)
        if obj is None:
            return
        self._admissions.started(owner)  # no other task runs until the reconciler has read the admission
        with RECONCILE_SECONDS.labels(owner.kind).time():
            await self._reconcilers[owner.kind](obj)

    def _done(self, owner: Owner, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._admissions.ended(owner)
        failed = task.cancelled() or task.exception() is not None
        self._work.done(owner, not failed, self._now())
        if task.cancelled():
            return
        if failed:  # one object must not stop the others; it is retried with back-off
            log.error("reconciling %s %s/%s failed", *owner, exc_info=task.exception())
        RECONCILES.labels(owner.kind, "error" if failed else "success").inc()
        self.on_done()
