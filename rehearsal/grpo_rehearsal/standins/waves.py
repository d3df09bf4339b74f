"""Waves of a direct transfer: when each has arrived, and how long members wait for one (pure)."""

from dataclasses import dataclass

from grpo_rehearsal.standins.pieces import Pieces
from grpo_worker.weightsync.planner.engine_plan import SEND_BUFFERS


@dataclass(frozen=True, slots=True)
class Waves:
    """Waves of one transfer. ``ends``: seconds from its begin until each has arrived.

    A rank sends a wave when the one before it by SEND_BUFFERS has arrived, and waits for it from then on.
    """

    ends: tuple[float, ...]

    @property
    def longest_wait(self) -> float:
        """Longest time from the send of a wave to its arrival."""
        begins = (0.0,) * SEND_BUFFERS + self.ends
        return max(end - begin for begin, end in zip(begins, self.ends, strict=False))

    @property
    def pieces(self) -> Pieces:
        """Progress that the ranks report: a wave when it is sent, and the last arrivals with the answer."""
        sent = self.ends[:-SEND_BUFFERS]
        first = min(SEND_BUFFERS, len(self.ends)) + 1
        return Pieces((*sent, self.ends[-1]), tuple(range(first, first + len(sent) + 1)))
