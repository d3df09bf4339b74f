"""Duration of recoveries, part by part (pure), and their Prometheus metrics."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from prometheus_client import Histogram


class Part(StrEnum):
    """Part of a recovery.

    DETECT: the fault is not reported yet. STOP: the gang ends. START: back-off, missing pods, start of the
    ranks. LOAD: state of the ranks, and its weights for the engines. REPLAY: steps until the one that the
    fault interrupted is finished, that one included.
    """

    DETECT = "detect"
    STOP = "stop"
    START = "start"
    LOAD = "load"
    REPLAY = "replay"


_BUCKETS = (0.1, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200)
_TOTAL = Histogram(
    "grpo_recovery_seconds",
    "Duration of recoveries, from the fault until the interrupted step is finished",
    ["cause"],
    buckets=_BUCKETS,
)
_PARTS = Histogram(
    "grpo_recovery_part_seconds", "Duration of each part of recoveries", ["part"], buckets=_BUCKETS
)


@dataclass(slots=True)
class Recovery:
    """A recovery that is under way. Faults that interrupt it prolong it.

    ``cause``, ``why``: of the first fault. ``began``: time of the fault, as far as it is known.
    """

    cause: str
    began: float
    why: str = ""
    seconds: dict[Part, float] = field(default_factory=lambda: dict.fromkeys(Part, 0.0))
    _part: Part = Part.DETECT
    _since: float = 0.0

    def __post_init__(self) -> None:
        self._since = self.began

    def enters(self, part: Part, now: float) -> None:
        """Begin the next part; the time since the last change belongs to the part before."""
        self.seconds[self._part] += now - self._since
        self._part, self._since = part, now

    def repeats(self, since: float, now: float) -> None:
        """Record another fault, at the time ``since``, that was reported now."""
        self.enters(Part.DETECT, max(since, self._since))
        self.enters(Part.STOP, now)

    def ends(self, now: float) -> float:
        """Return the whole duration."""
        self.enters(self._part, now)
        return now - self.began


def observe(cause: str, total: float, parts: Mapping[Part, float]) -> None:
    """Add a recovery to the histograms."""
    _TOTAL.labels(cause).observe(total)
    for part, seconds in parts.items():
        _PARTS.labels(part).observe(seconds)
