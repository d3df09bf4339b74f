"""Detection of stalled generation: samples are awaited, but no token arrives."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class SampleWatch:
    """Time since the last token while samples are awaited. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting = 0
        self._since = 0.0
        self._problem = ""

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count one more awaited sample while the context is open."""
        with self._lock:
            if self._waiting == 0:
                self._since, self._problem = self._clock(), ""
            self._waiting += 1
        try:
            yield
        finally:
            with self._lock:
                self._waiting -= 1

    def problem(self, text: str, unless_known: bool = False) -> None:
        """Record why an attempt failed. ``unless_known``: keep an earlier reason, which says more."""
        with self._lock:
            if not (unless_known and self._problem):
                self._problem = text

    def moved(self) -> None:
        """Record that tokens arrived."""
        with self._lock:
            self._since, self._problem = self._clock(), ""

    def stalled(self, limit: float) -> str:
        """Return why no token arrived for ``limit`` seconds; "" if one did, or no sample is awaited."""
        with self._lock:
            if self._waiting == 0 or self._clock() - self._since < limit:
                return ""
            return f"no token arrived for {limit:.0f} s: {self._problem or 'engines do not respond'}"
