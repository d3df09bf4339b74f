"""Progress of this process: counters that grow with each piece of work, however long the whole takes.

The thread that computes counts; the thread that watches reads. A gang hangs when no rank's counters grow.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

READ, WRITTEN = "bytes read", "bytes written"
STORAGE_WORK = frozenset({READ, WRITTEN})  # whoever stands still here waits for a store


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of one rank, small enough to be asked for from hundreds of ranks every few seconds.

    ``count`` grows with each piece of work. ``work``: kind of the newest piece. ``allowance``: seconds that
    the rank may now wait, without any progress, for others than its gang; such a wait has its own deadline.
    """

    count: int
    work: str = ""
    allowance: float = 0.0


class ProgressRecord:
    """Thread-safe counters of one process, cheap enough for every micro-batch and every tensor."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._amounts: dict[str, int] = {}
        self._work = ""
        self._allowance = 0.0
        self._reading = 0  # nested scopes of ``reading``

    def add(self, work: str, amount: int = 1) -> None:
        """Count a finished piece of work, such as one micro-batch or a number of bytes read."""
        with self._lock:
            self._amounts[work] = self._amounts.get(work, 0) + amount
            self._work = work

    @contextmanager
    def waiting(self, seconds: float) -> Iterator[None]:
        """Announce a wait of at most ``seconds`` for others than the gang, such as engines."""
        self._allowance = seconds
        try:
            yield
        finally:
            self._allowance = 0.0
            self.add("waits")

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Announce that a store is read: whoever stands still meanwhile waits for it."""
        self._reading += 1
        try:
            yield
        finally:
            self._reading -= 1

    @property
    def reads(self) -> bool:
        """True while a store is read."""
        return self._reading > 0

    def get(self) -> Progress:
        """Return the progress until now."""
        with self._lock:
            return Progress(sum(self._amounts.values()), self._work, self._allowance)

    def amounts(self) -> dict[str, int]:
        """Return the amount of each kind of work until now."""
        with self._lock:
            return dict(self._amounts)


PROGRESS = ProgressRecord()  # of the calls that this process answers
BACKGROUND = ProgressRecord()  # of its writers, which work beside the calls
