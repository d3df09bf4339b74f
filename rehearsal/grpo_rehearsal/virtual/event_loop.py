"""Event loop on virtual time: its selector waits on the scheduler instead of on file descriptors."""

import asyncio
import selectors
from typing import Any

from grpo_rehearsal.virtual.scheduler import Scheduler, Waiter


class VirtualLoop(asyncio.SelectorEventLoop):
    """Event loop whose thread is a participant. It serves timers and calls from other threads, no sockets."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._virtual = _VirtualSelector(scheduler)
        super().__init__(self._virtual)

    def time(self) -> float:
        """Return the scheduler's time, also to threads that are no participants."""
        return self._scheduler.now

    def _write_to_self(self) -> None:
        self._virtual.wake()


class _VirtualSelector(selectors.SelectSelector):
    """Selector that waits for its timeout or for ``wake``; it reports no file as ready."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self._scheduler = scheduler
        self._waiter: Waiter | None = None
        self._woken = False

    def wake(self) -> None:
        """End the wait of ``select``, or the next one."""
        if self._waiter is not None and not self._waiter.released and not self._waiter.expired:
            self._waiter.release()
        else:
            self._woken = True

    def select(self, timeout: float | None = None) -> list[Any]:
        if self._scheduler.current is None:  # while the loop is closed by a thread outside
            return []
        if not self._woken and (timeout is None or timeout > 0):
            self._waiter = self._scheduler.waiter()
            self._scheduler.wait(self._waiter, timeout, "event loop")
            self._waiter = None
        self._woken = False
        return []


class VirtualLoopPolicy(asyncio.DefaultEventLoopPolicy):
    """Makes every new event loop a virtual one."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self._scheduler = scheduler

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return VirtualLoop(self._scheduler)
