"""Part of a bucket that an engine rank keeps: its bytes in the bucket's own order, without the others. Pure.

Agent and rank compute it each for itself, from the table of regions that the rank has sent.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from grpo_worker.weightsync.planner.regions import Box, Tensor
from grpo_worker.weightsync.protocol.agent_stream import COUNT
from grpo_worker.weightsync.protocol.buffers import aligned, item_bytes

# int32 [regions, 5]: number of the tensor in the version, top, bottom, left, right; ordered by tensor.
# As objects, the regions of all ranks would need more memory than an agent has.
Table = npt.NDArray[np.int32]
FIELDS = 5
_ALIGNED = 16  # bytes, of each tensor: the widest load of a GPU, a multiple of every dtype's size


@dataclass(frozen=True, slots=True)
class Band:
    """Rows [top, bottom) of a tensor, in all of which a rank keeps the same columns.

    ``columns``: first byte in a row of the tensor, and the byte after the last, in order.
    ``start``: byte of the rank's part at which the first row begins. ``pitch``: bytes of a row there.
    """

    top: int
    bottom: int
    columns: tuple[tuple[int, int], ...]
    start: int
    pitch: int


@dataclass(frozen=True, slots=True)
class BucketPart:
    """What a rank keeps of a bucket. ``bands``: by number of the tensor in the bucket, from top to bottom."""

    nbytes: int
    bands: Mapping[int, tuple[Band, ...]]


def table_of(names: Sequence[str], kept: Mapping[str, Iterable[Box]]) -> Table:
    """Return the table of the regions ``kept`` of a version's tensors ``names``.

    Raises ValueError for a tensor that is not in the version, or has more rows or columns than int32 holds.
    """
    numbers = {name: number for number, name in enumerate(names)}
    if unknown := sorted(kept.keys() - numbers.keys()):
        raise ValueError(f"kept tensors must be those of the version, got {unknown[:5]}")
    rows = [(numbers[name], b.top, b.bottom, b.left, b.right) for name, boxes in kept.items() for b in boxes]
    table = np.array(sorted(rows), dtype=np.int64).reshape(-1, FIELDS)
    if table.size and table.max() > np.iinfo(np.int32).max:
        name = names[table[table.max(axis=1).argmax(), 0]]
        raise ValueError(f"{name} has more than 2^31 rows or columns: split it into several tensors")
    return table.astype(np.int32)


def pack_table(table: Table) -> bytes:
    """Return a table as a rank sends it to its agent: the number of regions, and their fields."""
    return COUNT.pack(len(table)) + table.astype("<i4").tobytes()


def union_of_tables(tables: Sequence[Table]) -> Table:
    """Return the table of the regions that are in at least one table, each once."""
    return np.unique(np.concatenate(tables), axis=0)


def part_of(
    tables: Iterable[Table], first: int, tensors: Sequence[Tensor], without: Table | None = None
) -> BucketPart:
    """Return what is kept of the bucket ``tensors``, whose first tensor is number ``first`` of the version.

    ``tables``: of one rank, or of several for what at least one of them keeps. ``without``: regions that are
    left out.
    """
    boxes = _boxes(union_of_tables([_of_bucket(table, first, tensors) for table in tables]), first)
    omitted = {} if without is None else _boxes(_of_bucket(without, first, tensors), first)
    found, end = {}, 0
    for number, of_tensor in boxes.items():
        place = item_bytes(tensors[number].dtype), aligned(end, _ALIGNED)
        if bands := _bands(of_tensor, omitted.get(number, ()), *place):
            found[number] = bands
            end = bands[-1].start + (bands[-1].bottom - bands[-1].top) * bands[-1].pitch
    return BucketPart(end, found)


def _of_bucket(table: Table, first: int, tensors: Sequence[Tensor]) -> Table:
    low, high = np.searchsorted(table[:, 0], [first, first + len(tensors)])
    return table[low:high]


def _boxes(table: Table, first: int) -> dict[int, list[Box]]:
    """Return the regions of a bucket by the number of the tensor in it."""
    boxes: dict[int, list[Box]] = defaultdict(list)
    for number, *box in table.tolist():
        boxes[number - first].append(Box(*box))
    return boxes


def _bands(boxes: Sequence[Box], omitted: Sequence[Box], item: int, start: int) -> tuple[Band, ...]:
    """Cut regions, which may overlap, at the rows where the kept columns change."""
    if len(boxes) == 1 and not omitted:  # as nearly always
        edges = [boxes[0].top, boxes[0].bottom]
    else:
        edges = sorted({edge for box in (*boxes, *omitted) for edge in (box.top, box.bottom)})
    result: list[Band] = []
    for top, bottom in pairwise(edges):
        columns = _columns_in(boxes, top, bottom, item)
        if omitted and columns:
            columns = _difference(columns, _columns_in(omitted, top, bottom, item))
        if not columns:
            continue
        pitch = sum(right - left for left, right in columns)
        result.append(Band(top, bottom, columns, start, pitch))
        start += (bottom - top) * pitch
    return tuple(result)


def _columns_in(boxes: Iterable[Box], top: int, bottom: int, item: int) -> tuple[tuple[int, int], ...]:
    """Return the columns of ``boxes`` in all of the rows, in bytes."""
    return _columns([(b.left, b.right) for b in boxes if b.top <= top and bottom <= b.bottom], item)


def _difference(
    columns: Iterable[tuple[int, int]], omitted: Iterable[tuple[int, int]]
) -> tuple[tuple[int, int], ...]:
    """Return ``columns`` without ``omitted``; both are in order and disjoint."""
    result: list[tuple[int, int]] = []
    for left, right in columns:
        at = left
        for begin, end in omitted:
            if at < begin < right:
                result.append((at, begin))
            if begin < right:
                at = max(at, end)
        if at < right:
            result.append((at, right))
    return tuple(result)


def _columns(ranges: Iterable[tuple[int, int]], item: int) -> tuple[tuple[int, int], ...]:
    """Return the union of column ranges, in bytes."""
    result: list[tuple[int, int]] = []
    for left, right in sorted(ranges):
        if result and left * item <= result[-1][1]:
            result[-1] = result[-1][0], max(result[-1][1], right * item)
        else:
            result.append((left * item, right * item))
    return tuple(result)
