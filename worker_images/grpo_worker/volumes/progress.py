"""How much of a volume has been fetched."""

import threading
import time
from collections.abc import Callable, Mapping

_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_REPORT_SECONDS = 1.0


class FetchProgress:
    """Counts bytes by file, for several threads. ``report``: is told at most once a second."""

    def __init__(self, doing: str, report: Callable[[str], None]) -> None:
        self._doing, self._report = doing, report
        self._lock = threading.Lock()
        self._expected: dict[str, int | None] = {}
        self._done: dict[str, int] = {}
        self._received = 0
        self._told = 0.0

    @property
    def received(self) -> int:
        """Bytes that came since this object was made."""
        return self._received

    def expect(self, sizes: Mapping[str, int | None]) -> None:
        """Set the sizes by file; None: not known."""
        with self._lock:
            self._expected = dict(sizes)

    def begin(self, file: str, there: int) -> None:
        """Set how much of a file is there already."""
        with self._lock:
            self._done[file] = there
        self._tell()

    def receive(self, file: str, size: int) -> None:
        """Add bytes of a file."""
        with self._lock:
            self._done[file] = self._done.get(file, 0) + size
            self._received += size
        self._tell()

    def __str__(self) -> str:
        """Such as ``fetching spec.model.volume: 3.1 of 16.4 GB``."""
        with self._lock:
            done, sizes = sum(self._done.values()), list(self._expected.values())
        if not sizes:
            return self._doing
        known = [size for size in sizes if size is not None]
        if len(known) < len(sizes):
            return f"{self._doing}: {amount(done)} so far"
        total = sum(known)
        scale, unit = _unit(total)
        return f"{self._doing}: {done / scale:.1f} of {total / scale:.1f} {unit}"

    def _tell(self) -> None:
        now = time.monotonic()
        with self._lock:
            if now - self._told < _REPORT_SECONDS:
                return
            self._told = now
        self._report(str(self))


def amount(size: float) -> str:
    """Bytes for people."""
    scale, unit = _unit(size)
    return f"{size / scale:.1f} {unit}"


def _unit(size: float) -> tuple[float, str]:
    return next((unit for unit in _UNITS if size >= unit[0]), (1.0, "bytes"))
