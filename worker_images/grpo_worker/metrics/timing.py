"""Seconds of the phases of a step, under verl's metric names."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class StepTimer:
    """Collects ``timing_s/<phase>``; repeated phases add up."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._start, self._cpu = time.monotonic(), time.process_time()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            key = f"timing_s/{name}"
            self.seconds[key] = self.seconds.get(key, 0.0) + time.monotonic() - started

    def total(self) -> float:
        return time.monotonic() - self._start

    def cpu(self) -> float:
        """Seconds of processor time of this process, all its threads together, since the beginning."""
        return time.process_time() - self._cpu
