"""Ranges of the distributed optimizer: which rank keeps which part of a parameter (pure)."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

CHUNK = 2**24  # elements that are saved or received at once; a save takes as much GPU memory
_WASTE = 4  # times as many chunks as asked for are allowed, so that they have the same length


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements ``start`` to ``end`` of a flattened parameter, whose optimizer state ``rank`` keeps."""

    rank: int
    start: int
    end: int


def pieces(start: int, end: int, bucket: int, shard: int) -> list[Piece]:
    """Return the pieces of a parameter, by rank of the data-parallel group.

    ``start``, ``end``: the parameter's place in the buffer. ``bucket``: start of its bucket there.
    ``shard``: elements of the bucket that each rank keeps.
    """
    found = []
    for rank in range((start - bucket) // shard, (end - 1 - bucket) // shard + 1):
        first = max(start, bucket + rank * shard)
        last = min(end, bucket + (rank + 1) * shard)
        found.append(Piece(rank, first - start, last - start))
    return found


def clipped(parts: Sequence[Piece], start: int, end: int) -> list[Piece]:
    """Return what the pieces have of elements ``start`` to ``end``."""
    within = (Piece(part.rank, max(part.start, start), min(part.end, end)) for part in parts)
    return [part for part in within if part.start < part.end]


def piece_of(parts: Sequence[Piece], rank: int) -> Piece | None:
    """Return the piece of a rank; None: it has none."""
    return next((part for part in parts if part.rank == rank), None)


class Owners:
    """Choice of the rank that saves each chunk, so that each saves about as much as it keeps.

    The ranges of a bucket begin anywhere in a chunk, and a buffer has many buckets: if the rank with most of
    a chunk saved it, the same ranks would always save more than others.
    """

    def __init__(self) -> None:
        self._missing = Counter[int]()  # elements that a rank keeps and has not saved for the others' it has

    def choose(self, parts: Sequence[Piece]) -> int:
        """Return the rank that saves a chunk: of those with a piece, the one that has saved the least."""
        for part in parts:
            self._missing[part.rank] += part.end - part.start
        owner = max(parts, key=lambda part: self._missing[part.rank]).rank
        self._missing[owner] -= sum(part.end - part.start for part in parts)
        return owner


def chunk_count(shape: Sequence[int], largest: int) -> int:
    """Return into how many chunks of equally many rows a parameter is cut.

    So that they have at most ``largest`` elements; 1 if its rows cannot be divided like that.
    """
    needed = -(-math.prod(shape) // largest)
    fitting = (count for count in range(needed, _WASTE * needed + 1) if shape[0] % count == 0)
    return next(fitting, 1) if needed > 1 and len(shape) > 1 else 1
