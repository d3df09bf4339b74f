"""When an agent loads a version by itself, and what ends it."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0  # seconds between attempts that fail
_LOOK_SECONDS = 3.0  # between looks for a peer that serves


class Refills:
    """Times of the attempts to load a version into one STALE engine; new after each success."""

    def __init__(self) -> None:
        self._next, self._pause = 0.0, _FIRST_PAUSE

    def due(self) -> bool:
        """Return whether the next attempt may begin."""
        return time.monotonic() >= self._next

    def failed(self) -> None:
        """Note that an attempt failed."""
        self._next = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def found_nothing(self) -> None:
        """Note that there was nothing to load."""
        self._next = time.monotonic() + _LOOK_SECONDS


class UrgentCalls:
    """Calls that wait while the engine is filled from a peer, and end that. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count a call while it waits and runs."""
        with self._lock:
            self._count += 1
        try:
            yield
        finally:
            with self._lock:
                self._count -= 1

    def any(self) -> bool:
        """Return whether a call waits."""
        return self._count > 0
