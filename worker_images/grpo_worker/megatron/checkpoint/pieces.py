"""Ranges of the distributed optimizer: which rank keeps which part of a parameter (pure)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

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


def owner_of(parts: Sequence[Piece]) -> int:
    """Return the rank that saves these pieces: the first one with the largest."""
    return max(parts, key=lambda part: part.end - part.start).rank


def chunk_count(shape: Sequence[int], largest: int) -> int:
    """Return into how many chunks of equally many rows a parameter is cut.

    So that they have at most ``largest`` elements; 1 if its rows cannot be divided like that.
    """
    needed = -(-math.prod(shape) // largest)
    fitting = (count for count in range(needed, _WASTE * needed + 1) if shape[0] % count == 0)
    return next(fitting, 1) if needed > 1 and len(shape) > 1 else 1
