"""Progress of the fetch of a volume."""

import threading
import time
from collections.abc import Callable, Mapping

_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_REPORT_SECONDS = 1.0


class FetchProgress:
    """Counts of bytes by file; thread-safe.

    ``action``: first words of each message. ``report``: receives a message at most once a second.
    """

    def __init__(self, action: str, report: Callable[[str], None]) -> None:
        self._action, self._report = action, report
        self._lock = threading.Lock()
        self._expected: dict[str, int | None] = {}
        self._done: dict[str, int] = {}
        self._received = 0
        self._reported_at = 0.0

    @property
    def received(self) -> int:
        """Number of bytes received since this object was created."""
        return self._received

    def expect(self, sizes: Mapping[str, int | None]) -> None:
        """Set the sizes by file; None if a size is unknown."""
        with self._lock:
            self._expected = dict(sizes)

    def begin(self, file: str, size: int) -> None:
        """Set the number of bytes of a file that an earlier attempt fetched."""
        with self._lock:
            self._done[file] = size
        self._report_if_due()

    def receive(self, file: str, size: int) -> None:
        """Add received bytes of a file."""
        with self._lock:
            self._done[file] = self._done.get(file, 0) + size
            self._received += size
        self._report_if_due()

    def __str__(self) -> str:
        """Return a message such as ``fetching spec.model.volume: 3.1 of 16.4 GB``."""
        with self._lock:
            done, sizes = sum(self._done.values()), list(self._expected.values())
        if not sizes:
            return self._action
        known = [size for size in sizes if size is not None]
        if len(known) < len(sizes):
            return f"{self._action}: {amount(done)} so far"
        total = sum(known)
        scale, unit = _unit(total)
        return f"{self._action}: {done / scale:.1f} of {total / scale:.1f} {unit}"

    def _report_if_due(self) -> None:
        now = time.monotonic()
        with self._lock:
            if now - self._reported_at < _REPORT_SECONDS:
                return
            self._reported_at = now
        self._report(str(self))


def amount(size: float) -> str:
    """Return a number of bytes with a unit."""
    scale, unit = _unit(size)
    return f"{size / scale:.1f} {unit}"


def _unit(size: float) -> tuple[float, str]:
    return next((unit for unit in _UNITS if size >= unit[0]), (1.0, "bytes"))
