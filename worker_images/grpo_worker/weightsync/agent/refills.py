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


class WaitingCalls:
    """Calls of the job that wait while the engine is filled without one, and may end that. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._versions: list[int | None] = []

    @contextmanager
    def waiting(self, version: int | None = None) -> Iterator[None]:
        """Note a call while it waits and runs. ``version``: which it only asks the engine to have."""
        with self._lock:
            self._versions.append(version)
        try:
            yield
        finally:
            with self._lock:
                self._versions.remove(version)

    def urgent(self) -> bool:
        """Return whether a call waits that needs the engine, whatever it serves."""
        return None in self._versions

    def other_than(self, version: int | None) -> str:
        """Return why an engine that is being filled with ``version`` is needed now; "": it is not."""
        waiting = [found for found in list(self._versions) if found is None or found != version]
        return "a call of the job needs the engine" if waiting else ""
