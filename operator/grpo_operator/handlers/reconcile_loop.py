"""Reconcile loop: owners are reconciled right after a change, and periodically.

The loop makes passes, none of which waits for an answer: a pass decides which owners are due, computes the
admission and starts tasks for them.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Mapping

from grpo_operator.api.names import Owner
from grpo_operator.handlers.background import until_success
from grpo_operator.handlers.owner_tasks import Admissions, OwnerTasks, Reconcile
from grpo_operator.handlers.workqueue import BURST_SECONDS, WorkQueue
from grpo_operator.observe.cache import Cache

PASS_SECONDS = 1.0  # longest time between two passes


class Loop:
    """Passes over the work queue.

    ``now``: asyncio's clock. ``last_pass``: when the last pass was finished; None before the first.
    """

    def __init__(self, cache: Cache, work: WorkQueue, now: Callable[[], float] = time.monotonic) -> None:
        self._cache = cache
        self._work = work
        self._now = now
        self._wake = asyncio.Event()
        self._released = False  # whether the last pass found owners that were due
        self.last_pass: float | None = None

    def enqueue(self, owners: Iterable[Owner]) -> None:
        """Schedule owners for the next pass."""
        for owner in owners:
            self._work.add(owner, self._now())
        self._wake.set()

    def longest_reconcile(self) -> float:
        """Return the seconds that the longest running reconcile has taken. May be called from any thread."""
        return self._work.longest_running(self._now())

    async def run(
        self, admissions: Admissions, reconcilers: Mapping[str, Reconcile], poll: Callable[[], None]
    ) -> None:
        """Make passes until cancelled. ``poll``: starts polls of the owners' pods, called in each pass."""
        tasks = OwnerTasks(self._cache, self._work, admissions, reconcilers, self._now)
        tasks.on_done = lambda: self._after(tasks)
        try:
            while True:
                await until_success("the reconcile loop", lambda: self._pass(admissions, tasks, poll))
                if self._released:  # the first change of a burst is handled at once, the rest together
                    await asyncio.sleep(BURST_SECONDS)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), self._pause())
                self._wake.clear()
        finally:
            await tasks.cancel()

    async def _pass(self, admissions: Admissions, tasks: OwnerTasks, poll: Callable[[], None]) -> None:
        poll()
        self._work.retain(self._cache.owners())
        due = self._work.next_due()
        self._released = due is not None and due <= self._now()
        if self._released:
            admissions.update()  # first: a new owner without an admission would count as admitted
            self._work.release(self._now())
        tasks.start()
        self.last_pass = self._now()

    def _after(self, tasks: OwnerTasks) -> None:
        tasks.start()
        due = self._work.next_due()
        if due is not None and due - self._now() < PASS_SECONDS:
            self._wake.set()

    def _pause(self) -> float:
        due = self._work.next_due()
        return PASS_SECONDS if due is None else max(min(due - self._now(), PASS_SECONDS), 0.001)
