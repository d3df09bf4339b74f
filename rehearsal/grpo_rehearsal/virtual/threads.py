"""Virtual time for unchanged code: replaces the waits of Python's standard library while a rehearsal runs.

Everything in the controller that waits ends in one of five places: ``time.sleep``, ``Condition.wait`` (which
futures, events, semaphores and queues use), ``Thread.join``, the queue of a ThreadPoolExecutor, and the
selector of an event loop. Inside ``virtual_time`` these wait on the scheduler when a participant calls them;
other threads keep the real ones. Locks stay real: a participant must not wait while it holds a lock.
"""

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from grpo_rehearsal.virtual.event_loop import VirtualLoopPolicy
from grpo_rehearsal.virtual.scheduler import Participant, Scheduler, Stopped

_REAL_MONOTONIC = time.monotonic
_REAL_SLEEP = time.sleep
_REAL_WAIT = threading.Condition.wait
_REAL_START = threading.Thread.start
_REAL_JOIN = threading.Thread.join


@contextmanager
def virtual_time(scheduler: Scheduler, name: str = "main") -> Iterator[Scheduler]:
    """Run the context, and the threads that it starts, on the scheduler's time.

    At the end the threads that still wait are ended by the exception Stopped.
    """
    waits = _Waits(scheduler)
    with ExitStack() as stack:
        for owner, attribute, replacement in (
            (time, "monotonic", waits.monotonic),
            (time, "sleep", waits.sleep),
            (threading, "_time", waits.monotonic),
            (queue, "time", waits.monotonic),
            (queue, "SimpleQueue", queue._PySimpleQueue),  # type: ignore[attr-defined]
            (threading.Condition, "wait", waits.condition_wait()),
            (threading.Thread, "start", waits.thread_start()),
            (threading.Thread, "join", waits.thread_join()),
        ):
            stack.enter_context(mock.patch.object(owner, attribute, replacement))
        policy = asyncio.get_event_loop_policy()
        asyncio.set_event_loop_policy(VirtualLoopPolicy(scheduler))
        stack.callback(asyncio.set_event_loop_policy, policy)
        scheduler.join(name)
        try:
            yield scheduler
        finally:
            with mock.patch("concurrent.futures._base.LOGGER"):  # pools log the exception that ends them
                scheduler.stop()


class _Waits:
    """Replacements of the standard library's waits. ``_finished``: waits for the end of a thread."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._finished: dict[threading.Thread, list[Any]] = {}
        self._starting = threading.local()  # whether this thread is inside Thread.start

    def monotonic(self) -> float:
        return self._scheduler.now if self._scheduler.current else _REAL_MONOTONIC()

    def sleep(self, seconds: float) -> None:
        if self._scheduler.current:
            self._scheduler.sleep(seconds)
        else:
            _REAL_SLEEP(seconds)

    def condition_wait(self) -> Callable[..., bool]:
        scheduler, starting = self._scheduler, self._starting

        def wait(self: Any, timeout: float | None = None) -> bool:
            if scheduler.current is None or getattr(starting, "on", False):
                return _REAL_WAIT(self, timeout)
            if not self._is_owned():
                raise RuntimeError("cannot wait on un-acquired lock")
            if timeout is not None and timeout <= 0:
                return False  # executors wait no time, and hold a real lock that others need
            waiter = scheduler.waiter()
            self._waiters.append(waiter)
            saved = self._release_save()
            try:
                return scheduler.wait(waiter, timeout, "condition")
            finally:
                self._acquire_restore(saved)
                if not waiter.released and waiter in self._waiters:
                    self._waiters.remove(waiter)

        return wait

    def thread_start(self) -> Callable[[threading.Thread], None]:
        waits = self

        def start(self: threading.Thread) -> None:
            scheduler = waits._scheduler
            if scheduler.current is None:
                _REAL_START(self)
                return
            participant = scheduler.adopt(self.name)
            participant.thread = self
            waits._finished[self] = []
            own_run = self.run
            self.run = lambda: waits._run(participant, own_run)  # type: ignore[method-assign]
            waits._starting.on = True
            try:
                _REAL_START(self)
            finally:
                waits._starting.on = False

        return start

    def _run(self, participant: Participant, own_run: Callable[[], None]) -> None:
        """Run a thread as a participant."""
        try:
            self._scheduler.enter(participant)
            own_run()
        except Stopped:
            pass
        finally:
            assert participant.thread is not None
            for waiter in self._finished.pop(participant.thread, []):
                waiter.release()
            self._scheduler.leave(participant)

    def thread_join(self) -> Callable[..., None]:
        waits = self

        def join(self: threading.Thread, timeout: float | None = None) -> None:
            scheduler = waits._scheduler
            if scheduler.current is not None and self in waits._finished:
                waiter = scheduler.waiter()
                waits._finished[self].append(waiter)
                if not scheduler.wait(waiter, timeout, f"end of {self.name}"):
                    return
            _REAL_JOIN(self, timeout)

        return join
