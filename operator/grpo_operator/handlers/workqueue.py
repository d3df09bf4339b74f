"""Work queue: owners are due after a change, after an error with a backoff, and periodically."""

from collections.abc import Iterable

Key = tuple[str, str, str]  # kind, namespace, name
RESYNC_SECONDS = 15.0
_MAX_BACKOFF = 30.0  # seconds


class WorkQueue:
    """Keys with the time at which they are due, in seconds of a monotonic clock."""

    def __init__(self) -> None:
        self._due: dict[Key, float] = {}
        self._failures: dict[Key, int] = {}

    def add(self, key: Key, now: float) -> None:
        """Make a key due now. A key that failed keeps its backoff, or it would be retried in a loop."""
        if key not in self._failures:
            self._due[key] = min(self._due.get(key, now), now)

    def pop_due(self, now: float) -> list[Key]:
        """Remove and return the due keys, sorted; each must be reported back with ``done``."""
        due = sorted(key for key, time in self._due.items() if time <= now)
        for key in due:
            del self._due[key]
        return due

    def done(self, key: Key, succeeded: bool, now: float) -> None:
        """Schedule the next reconcile: after RESYNC_SECONDS, or after an error with exponential backoff."""
        if succeeded:
            self._failures.pop(key, None)
            wait = RESYNC_SECONDS
        else:
            self._failures[key] = self._failures.get(key, 0) + 1
            wait = min(2.0 ** self._failures[key] / 2, _MAX_BACKOFF)
        self._due[key] = min(self._due.get(key, now + wait), now + wait)

    def retain(self, keys: Iterable[Key]) -> None:
        """Drop all keys but these."""
        keep = set(keys)
        for known in (self._due, self._failures):
            for key in [k for k in known if k not in keep]:
                known.pop(key)
