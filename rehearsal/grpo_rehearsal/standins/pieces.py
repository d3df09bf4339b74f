"""Progress of a call: when each piece of its work is done, and what the piece counts (pure)."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


@dataclass(frozen=True, slots=True)
class Pieces:
    """Pieces of one call.

    ``ends``: seconds from the begin of the call to the end of each. ``counts``: progress until then.
    """

    ends: tuple[float, ...]
    counts: tuple[int, ...]

    @property
    def seconds(self) -> float:
        """Duration of the call."""
        return self.ends[-1]

    @property
    def count(self) -> int:
        """Progress that the whole call reports."""
        return self.counts[-1]

    @property
    def longest(self) -> float:
        """Longest time without progress."""
        return max(end - begin for begin, end in pairwise((0.0, *self.ends)))

    def done(self, elapsed: float) -> int:
        """Return the progress ``elapsed`` seconds after the begin."""
        number = bisect_right(self.ends, elapsed)
        return self.counts[number - 1] if number else 0

    def after(self, seconds: float) -> "Pieces":
        """Return these pieces behind another one that takes ``seconds``."""
        ends = (seconds, *(seconds + end for end in self.ends))
        return Pieces(ends, (1, *(1 + count for count in self.counts)))

    def since(self, elapsed: float) -> "Pieces":
        """Return what is left of the pieces after ``elapsed`` seconds."""
        left = [(end - elapsed, count) for end, count in zip(self.ends, self.counts, strict=True)]
        left = [(end, count - self.done(elapsed)) for end, count in left if end > 0]
        return Pieces(tuple(end for end, _ in left), tuple(count for _, count in left)) if left else even(0.0)


def even(seconds: float, pieces: float = 1) -> Pieces:
    """Return ``pieces`` equal ones, at least one, that take ``seconds`` together."""
    count = max(int(pieces), 1)
    numbers = range(1, count + 1)
    return Pieces(tuple(seconds * number / count for number in numbers), tuple(numbers))


def in_proportion(amounts: Sequence[int], seconds: float) -> Pieces:
    """Return pieces that count ``amounts`` and take ``seconds`` together, each its share."""
    counts = tuple(accumulate(amounts))
    if not counts or not counts[-1]:
        return even(seconds)
    return Pieces(tuple(seconds * count / counts[-1] for count in counts), counts)
