"""Slices of a version that lies in the ranks of an engine: each byte in one rank that keeps it. Pure.

An engine that has a version can so be read like trainer ranks that have published it.
"""

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from grpo_worker.weightsync.planner.boxes import box_of, tensor_of
from grpo_worker.weightsync.planner.rank_parts import Table
from grpo_worker.weightsync.planner.regions import Box, RegionError
from grpo_worker.weightsync.protocol.buffers import item_bytes
from grpo_worker.weightsync.protocol.link_exchange import TensorRow
from grpo_worker.weightsync.protocol.manifest import Slice
from grpo_worker.weightsync.protocol.region_stream import RegionPart

_Kept = Sequence[tuple[int, Box]]  # ranks, each with a region that it keeps


def slices_of_kept(rows: Sequence[TensorRow], tables: Sequence[Table]) -> list[list[Slice]]:
    """Return the slices to read from each rank, which together make up all tensors of which a part is kept.

    ``tables``: of the regions that each rank keeps; numbers are those of ``rows``. What several ranks keep is
    read from the one of which least is read so far. Raises RegionError for a tensor that is not kept
    completely, or whose regions are cut along rows and columns.
    """
    kept: dict[int, list[tuple[int, Box]]] = defaultdict(list)
    for rank, table in enumerate(tables):
        for number, *box in table.tolist():
            kept[number].append((rank, Box(*box)))
    loads = [0] * len(tables)
    found: list[list[Slice]] = [[] for _ in tables]
    for number, of_tensor in sorted(kept.items()):
        for rank, part in _slices(rows[number], of_tensor, loads):
            found[rank].append(part)
            loads[rank] += part.nbytes
    return [_placed(of_rank) for of_rank in found]


def _slices(row: TensorRow, kept: _Kept, loads: Sequence[int]) -> Iterator[tuple[int, Slice]]:
    tensor = tensor_of(row.shape, row.dtype)
    width = math.prod(row.shape[2:])  # columns of one element along dimension 1
    if all((box.left, box.right) == (0, tensor.columns) for _, box in kept):
        dim, ranges, step, end = 0, [(box.top, box.bottom, rank) for rank, box in kept], 1, tensor.rows
        line = tensor.columns * item_bytes(row.dtype)
    elif all((box.top, box.bottom) == (0, tensor.rows) for _, box in kept):
        dim, ranges, step, end = 1, [(box.left, box.right, rank) for rank, box in kept], width, tensor.columns
        line = tensor.rows * item_bytes(row.dtype)
    else:
        raise RegionError(f"{row.name}: the ranks keep regions that are cut along both rows and columns")
    for low, high, ranks in _intervals(row.name, ranges, end):
        if low % step or high % step:
            raise RegionError(f"{row.name}: columns {low} to {high} are cut within a row of dimension 1")
        rank = min(ranks, key=lambda rank: (loads[rank], rank))
        nbytes = (high - low) * line
        yield (
            rank,
            Slice(row.name, row.shape, row.dtype, dim, low // step, (high - low) // step, 0, nbytes),
        )


def _intervals(
    name: str, ranges: Sequence[tuple[int, int, int]], end: int
) -> Iterator[tuple[int, int, list[int]]]:
    """Yield disjoint intervals that make up 0 to ``end``, each with the ranks that keep it."""
    edges = sorted({0, end, *(edge for low, high, _ in ranges for edge in (low, high))})
    for low, high in pairwise(edges):
        ranks = sorted({rank for a, b, rank in ranges if a <= low and high <= b})
        if not ranks:
            raise RegionError(f"{name}: no rank keeps rows or columns {low} to {high} of {end}")
        yield low, high, ranks


def _placed(slices: Sequence[Slice]) -> list[Slice]:
    """Give slices their places in the rank's blob; those of one size, such as scales, are adjacent."""
    result, start = [], 0
    for part in sorted(slices, key=lambda part: (part.nbytes, part.name, part.offset)):
        fields = part.name, part.shape, part.dtype, part.dim, part.offset, part.length
        result.append(Slice(*fields, start, part.nbytes))
        start += part.nbytes
    return result


@dataclass(frozen=True, slots=True)
class RankBlob:
    """Slices that fill a blob read from one rank. ``numbers``: of the tensors of ``slices``."""

    slices: Sequence[Slice]
    numbers: Sequence[int]

    def parts(self, first: int, end: int) -> Iterator[RegionPart]:
        """Yield what bytes ``first`` to ``end`` of the blob are. Raises ValueError beyond its end."""
        size = self.slices[-1].start + self.slices[-1].nbytes if self.slices else 0
        if not 0 <= first < end <= size:
            raise ValueError(f"bytes {first} to {end} must lie in a blob of {size} bytes")
        index = bisect_right(self.slices, first, key=lambda part: part.start) - 1
        while first < end:
            part = self.slices[index]
            take = min(end, part.start + part.nbytes) - first
            box = box_of(part, tensor_of(part.shape, part.dtype))
            yield RegionPart(self.numbers[index], box, first - part.start, take)
            first, index = first + take, index + 1
