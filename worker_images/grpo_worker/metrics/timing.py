"""Durations of the phases of a step, under verl's metric names."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from grpo_worker.common.clock import SYSTEM_CLOCK, Clock


class StepTimer:
    """Seconds of each phase as ``timing_s/<phase>``; repeated phases add up."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self.seconds: dict[str, float] = {}
        self._clock = clock
        self._start, self._cpu = clock.now(), time.process_time()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the time while the context is open."""
        started = self._clock.now()
        try:
            yield
        finally:
            key = f"timing_s/{name}"
            self.seconds[key] = self.seconds.get(key, 0.0) + self._clock.now() - started

    def total(self) -> float:
        """Return the seconds since the timer was created."""
        return self._clock.now() - self._start

    def cpu(self) -> float:
        """Return this process's CPU seconds, over all threads, since the timer was created."""
        return time.process_time() - self._cpu
