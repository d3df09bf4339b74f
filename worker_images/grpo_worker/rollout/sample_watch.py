"""How long nothing has come of the samples that are awaited."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class SampleWatch:
    """Knows since when groups of samples are awaited without one that was accepted. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting = 0
        self._since = 0.0
        self._problem = ""

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A group is awaited while this is open."""
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
        """Note why an attempt at a group failed. ``unless_known``: an earlier reason says more."""
        with self._lock:
            if not (unless_known and self._problem):
                self._problem = text

    def accepted(self) -> None:
        """A group has come."""
        with self._lock:
            self._since, self._problem = self._clock(), ""

    def stalled(self, limit: float) -> str:
        """Why no group was accepted for ``limit`` seconds, or nothing while all is well."""
        with self._lock:
            if self._waiting == 0 or self._clock() - self._since < limit:
                return ""
            return f"no sample was accepted for {limit:.0f} s: {self._problem or 'engines give no answer'}"
