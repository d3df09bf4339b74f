"""Clock of the controller: code that waits takes one, so that tests and rehearsals run on virtual time."""

import time
from typing import Protocol


class Clock(Protocol):
    """Source of time. ``now`` and ``sleep`` agree: sleeping n seconds advances ``now`` by at least n."""

    def now(self) -> float:
        """Return seconds that never decrease; only differences have a meaning."""

    def sleep(self, seconds: float) -> None:
        """Block the calling thread."""


class SystemClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


SYSTEM_CLOCK: Clock = SystemClock()
