"""Clock of the controller: code that waits takes one, so that tests and rehearsals run on virtual time."""

import time
from datetime import UTC, datetime, timedelta
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


def utc_time(seconds: float = 0.0) -> str:
    """Return the time in ``seconds`` from now, in the format of Kubernetes (RFC 3339, UTC, whole seconds)."""
    return (datetime.now(UTC) + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")
