"""Scheduler of virtual time: one thread runs at a time, and time moves only when every thread waits.

The code under rehearsal keeps its threads. Each of them is a participant, and exactly one participant holds
the baton and runs. A participant that waits hands the baton to the next one that is ready, in the order in
which they became ready. When none is ready, the time jumps to the next timer. So a run depends neither on the
machine's speed nor on the operating system's choice of threads, and the same run happens every time.

The work of stand-ins runs in timers, which must not block.
"""

import heapq
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

_allocate_lock = threading.Lock


class DeadlockError(RuntimeError):
    """Every participant waits, and no timer is left that could end a wait."""


class Stopped(SystemExit):
    """Ends the participants that still wait when the rehearsal is over."""


@dataclass(eq=False, slots=True)
class Participant:
    """One thread. ``gate``: locked while the thread waits. ``cpu``: seconds of its own computation."""

    name: str
    gate: Any = field(default_factory=_allocate_lock)
    cpu: float = 0.0
    stood_in: float = 0.0  # seconds of ``cpu`` in stand-ins
    began: float = 0.0  # CPU time of the thread when it last got the baton
    waiting_for: str = ""
    thread: threading.Thread | None = None

    def __post_init__(self) -> None:
        self.gate.acquire()


class Waiter:
    """One wait. ``release`` ends it; threading.Condition calls it in ``notify``."""

    __slots__ = ("_participant", "_scheduler", "expired", "released")

    def __init__(self, scheduler: "Scheduler", participant: Participant) -> None:
        self._scheduler, self._participant = scheduler, participant
        self.released = self.expired = False

    def release(self) -> None:
        """Make the waiting participant ready. Raises RuntimeError if the wait has ended already."""
        if self.released or self.expired:
            raise RuntimeError("the wait has ended already")
        self.released = True
        self._scheduler.make_ready(self._participant)

    def expire(self) -> None:
        """End the wait because its time is over."""
        if not self.released:
            self.expired = True
            self._scheduler.make_ready(self._participant)


class Timer:
    """Call of a function at a time. ``cancel`` prevents it."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[[], None]) -> None:
        self.function: Callable[[], None] | None = function

    def cancel(self) -> None:
        self.function = None


class Scheduler:
    """Virtual time and the participants that share it. ``now``: seconds since the start of the rehearsal."""

    def __init__(self) -> None:
        self.now = 0.0
        self.participants: list[Participant] = []
        self._ready: deque[Participant] = deque()
        self._timers: list[tuple[float, int, Timer]] = []
        self._numbers = count()
        self._local = threading.local()
        self._stopped = False
        self._deadlock = ""
        self._ended: list[Participant] = []  # their CPU times are still of interest
        self._timer_cpu = 0.0

    @property
    def current(self) -> Participant | None:
        """Return the participant of the calling thread; None if it is none."""
        return getattr(self._local, "participant", None)

    def join(self, name: str) -> Participant:
        """Make the calling thread the first participant, which holds the baton."""
        participant = Participant(name, thread=threading.current_thread())
        self._local.participant = participant
        self.participants.append(participant)
        participant.began = time.thread_time()
        return participant

    def adopt(self, name: str) -> Participant:
        """Return a new participant for a thread that is about to start; it is ready at once."""
        participant = Participant(name)
        self.participants.append(participant)
        self._ready.append(participant)
        return participant

    def enter(self, participant: Participant) -> None:
        """Wait in the new thread of ``participant`` for its first turn."""
        self._local.participant = participant
        participant.gate.acquire()
        self._begin_turn(participant)

    def leave(self, participant: Participant) -> None:
        """End ``participant``, whose thread calls this last, and hand the baton on."""
        self._end_turn(participant)
        self.participants.remove(participant)
        self._ended.append(participant)
        self._local.participant = None
        if not self._stopped:
            self._next().gate.release()

    def make_ready(self, participant: Participant) -> None:
        self._ready.append(participant)

    def call_at(self, when: float, function: Callable[[], None]) -> Timer:
        """Call ``function`` at a time; it must not block. Calls of the same time keep their order."""
        timer = Timer(function)
        heapq.heappush(self._timers, (max(when, self.now), next(self._numbers), timer))
        return timer

    def call_later(self, delay: float, function: Callable[[], None]) -> Timer:
        return self.call_at(self.now + delay, function)

    def waiter(self) -> Waiter:
        """Return a new wait of the calling participant."""
        participant = self.current
        assert participant is not None, "only participants wait on virtual time"
        return Waiter(self, participant)

    def wait(self, waiter: Waiter, timeout: float | None = None, reason: str = "") -> bool:
        """Block until ``waiter`` is released, at most ``timeout`` seconds; return whether it was.

        A timeout of 0 lets other ready participants run. Raises DeadlockError in the first participant when
        none can ever continue.
        """
        participant = self.current
        assert participant is not None, "only participants wait on virtual time"
        timer = None if timeout is None else self.call_later(max(timeout, 0.0), waiter.expire)
        participant.waiting_for = reason
        self._end_turn(participant)
        if not self._stopped:
            following = self._next()
            if following is not participant:
                following.gate.release()
                participant.gate.acquire()
        self._begin_turn(participant)
        if timer is not None:
            timer.cancel()
        if self._stopped:
            raise Stopped
        if self._deadlock and participant is self.participants[0]:
            raise DeadlockError(self._deadlock)
        return waiter.released

    def sleep(self, seconds: float) -> None:
        """Wait ``seconds`` of virtual time."""
        self.wait(self.waiter(), seconds, "sleep")

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """Count the CPU time of the context as work of stand-ins, not of the code under rehearsal."""
        participant, began = self.current, time.thread_time()
        try:
            yield
        finally:
            if participant is not None:
                participant.stood_in += time.thread_time() - began

    def cpu_by_thread(self) -> dict[str, float]:
        """Return the CPU seconds of the code under rehearsal, by the thread's name without its number."""
        seconds: dict[str, float] = {}
        if self.current is not None:
            self._end_turn(self.current)
            self._begin_turn(self.current)
        for participant in (*self.participants, *self._ended):
            name = participant.name.rstrip("0123456789").rstrip("_-")
            seconds[name] = seconds.get(name, 0.0) + participant.cpu - participant.stood_in
        return seconds

    def stand_in_cpu(self) -> float:
        """Return the CPU seconds of the stand-ins."""
        return self._timer_cpu + sum(p.stood_in for p in (*self.participants, *self._ended))

    def stop(self) -> None:
        """End all other participants, whose waits raise Stopped, and wait for their threads."""
        own, self._local.participant = self.current, None
        self._stopped = True
        for other in [p for p in self.participants if p is not own]:
            other.gate.release()
            if other.thread is not None:
                other.thread.join(timeout=10)

    def _next(self) -> Participant:
        """Return the next participant to run; move time forward until there is one."""
        while not self._ready:
            if not self._timers:
                waits = ", ".join(f"{p.name} ({p.waiting_for})" for p in self.participants)
                self._deadlock = f"every participant waits and no timer is left: {waits}"
                return self.participants[0]
            when, _, timer = heapq.heappop(self._timers)
            if timer.function is None:
                continue
            self.now = when
            began = time.thread_time()
            timer.function()
            self._timer_cpu += time.thread_time() - began
        return self._ready.popleft()

    @staticmethod
    def _begin_turn(participant: Participant) -> None:
        participant.began = time.thread_time()

    @staticmethod
    def _end_turn(participant: Participant) -> None:
        participant.cpu += time.thread_time() - participant.began
