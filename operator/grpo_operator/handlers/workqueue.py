"""Work queue: which owner is due when, and which due owner is reconciled next.

Owners are due after a change, after an error with a back-off, and periodically. An owner is reconciled at
most once at a time, and no namespace takes more than its share of the places.
"""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass

Key = tuple[str, str, str]  # kind, namespace, name
RESYNC_SECONDS = 15.0
BURST_SECONDS = 0.3  # between two reconciles of an owner, so that the second covers a burst of changes
BUSY_SECONDS = 1.2  # the same of an owner that goes on changing: each status in between would be a write
_MAX_BACKOFF = 30.0  # seconds


@dataclass(frozen=True, slots=True)
class Limits:
    """Reconciles at once.

    ``stalled_seconds``: after which a reconcile no longer counts for ``total``: it waits for an answer, for
    example of an admission webhook. So namespaces that hang cannot take all places, however many they are.
    """

    total: int = 16
    namespace: int = 4
    stalled_seconds: float = 3.0


class WorkQueue:
    """Keys that are due at a time, ready to be started, or running. Times are of a monotonic clock."""

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._due: dict[Key, float] = {}
        self._rest: dict[Key, tuple[float, float]] = {}  # end and seconds of the rest after a reconcile
        self._failures: dict[Key, int] = {}
        self._ready: dict[str, deque[Key]] = {}  # by namespace; the one that was served last comes last
        self._running: dict[Key, float] = {}  # with the time of the start
        self._busy = Counter[str]()  # running keys by namespace

    def add(self, key: Key, now: float) -> None:
        """Make a key due now. A key that failed keeps its backoff, or it would be retried in a loop."""
        if key not in self._failures:
            due = max(now, self._rest.get(key, (now, 0))[0])
            self._due[key] = min(self._due.get(key, due), due)

    def release(self, now: float) -> list[Key]:
        """Make the keys that are due ready to be started, the longest due first, and return them."""
        waiting = {key for keys in self._ready.values() for key in keys}
        due = [(time, key) for key, time in self._due.items() if time <= now and key not in self._running]
        released = [key for _, key in sorted(due)]
        for key in released:
            del self._due[key]
            if key not in waiting:
                self._ready.setdefault(key[1], deque()).append(key)
        return released

    def next_due(self) -> float | None:
        """Return when the next key that does not run is due, or None."""
        return min((time for key, time in self._due.items() if key not in self._running), default=None)

    def start(self, now: float) -> Key | None:
        """Return the next key to reconcile, or None while there is none or no place is free.

        The namespace with the fewest running keys comes first, among equals the one that has waited longest.
        Each key must be reported back with ``done``.
        """
        active = sum(now - started < self._limits.stalled_seconds for started in self._running.values())
        free = [name for name in self._ready if self._busy[name] < self._limits.namespace]
        if not free or active >= self._limits.total:
            return None
        namespace = min(free, key=self._busy.__getitem__)
        keys = self._ready.pop(namespace)
        key = keys.popleft()
        if keys:
            self._ready[namespace] = keys
        self._running[key] = now
        self._busy[namespace] += 1
        return key

    def done(self, key: Key, succeeded: bool, now: float) -> None:
        """Schedule the next reconcile: after RESYNC_SECONDS, or after an error with exponential backoff."""
        rested = self._rest_after(key, self._running.pop(key))
        self._busy[key[1]] -= 1
        self._rest[key] = now + rested, rested
        if succeeded:
            self._failures.pop(key, None)
            wait = RESYNC_SECONDS
        else:
            self._failures[key] = self._failures.get(key, 0) + 1
            wait = min(2.0 ** self._failures[key] / 2, _MAX_BACKOFF)
        due = min(self._due.get(key, now + wait), now + wait)
        self._due[key] = max(due, now + rested)

    def _rest_after(self, key: Key, started: float) -> float:
        """Return the seconds to rest: twice as many as before when the last rest had hardly ended."""
        end, before = self._rest.get(key, (started, 0.0))
        return min(2 * before, BUSY_SECONDS) if before and started - end < before else BURST_SECONDS

    def longest_running(self, now: float) -> float:
        """Return the seconds since the start of the key that has run longest; 0 while none runs.

        May be called from any thread.
        """
        return max((now - started for started in list(self._running.values())), default=0.0)

    def retain(self, keys: Iterable[Key]) -> None:
        """Drop all keys but these; those that run stay until they are done."""
        keep = set(keys)
        for known in (self._due, self._failures, self._rest):
            for key in [k for k in known if k not in keep]:
                known.pop(key)
        kept = {name: deque(k for k in ready if k in keep) for name, ready in self._ready.items()}
        self._ready = {name: ready for name, ready in kept.items() if ready}
