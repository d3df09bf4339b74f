"""What is to be reconciled, and when: after a change, again after an error, and now and then."""

from collections.abc import Iterable

Key = tuple[str, str, str]  # kind, namespace, name
RESYNC_SECONDS = 15.0
_LONGEST_WAIT = 30.0


class WorkQueue:
    """Objects with the time at which they are due. Times are seconds of a monotonic clock."""

    def __init__(self) -> None:
        self._due: dict[Key, float] = {}
        self._failures: dict[Key, int] = {}

    def mark(self, key: Key, now: float) -> None:
        """Something changed. An object that failed keeps its wait, or a broken one would spin."""
        if key not in self._failures:
            self._due[key] = min(self._due.get(key, now), now)

    def take(self, now: float) -> list[Key]:
        """The objects that are due, in a fixed order; each must be finished with ``done``."""
        due = sorted(key for key, time in self._due.items() if time <= now)
        for key in due:
            del self._due[key]
        return due

    def done(self, key: Key, succeeded: bool, now: float) -> None:
        """Look again after a while: sooner after an error, at growing distance."""
        if succeeded:
            self._failures.pop(key, None)
            wait = RESYNC_SECONDS
        else:
            self._failures[key] = self._failures.get(key, 0) + 1
            wait = min(2.0 ** self._failures[key] / 2, _LONGEST_WAIT)
        self._due[key] = min(self._due.get(key, now + wait), now + wait)

    def forget_all_but(self, keys: Iterable[Key]) -> None:
        """Drop objects that no longer exist."""
        keep = set(keys)
        for known in (self._due, self._failures):
            for key in [k for k in known if k not in keep]:
                known.pop(key)
