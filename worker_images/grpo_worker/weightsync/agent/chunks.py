"""Chunks of a version: the unit in which an agent fetches it and sends it on. Pure.

A bucket has the size that suits its receiver; its largest tensor decides. A chunk is a part of a bucket that
is small enough for the agent's memory. A tensor that is split by columns is cut between its rows, so that a
chunk needs one range of each rank's blob.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from grpo_worker.weightsync.protocol.digest import PIECE
from grpo_worker.weightsync.protocol.manifest import Slice
from grpo_worker.weightsync.protocol.tiling import PlanError, TensorPlan
from grpo_worker.weightsync.protocol.transfer_plan import Bucket, nbytes

CHUNK = 64 << 20  # bytes; an agent holds two


@dataclass(frozen=True, slots=True)
class Extent:
    """A range of a rank's blob, and its place in a chunk.

    ``slice_start``: first byte of its slice in the blob. ``start``, ``nbytes``: bytes of the blob.
    ``at``: byte of the chunk where its first row begins. ``row``: bytes of a row. ``stride``: bytes from one
    row to the next in the chunk; equal to ``row`` if there are no gaps.
    """

    rank: int
    slice_start: int
    start: int
    nbytes: int
    at: int
    row: int
    stride: int


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of a tensor in a chunk.

    ``tensor``: its number in the bucket. ``begin``, ``nbytes``: bytes of it. ``at``: byte of the chunk.
    """

    tensor: int
    begin: int
    nbytes: int
    at: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """``nbytes`` bytes of bucket ``bucket``, from byte ``start`` of those that are wanted on.

    ``last``: they complete the bucket. ``spans``: what they are. ``extents``: where they are.
    """

    bucket: int
    start: int
    nbytes: int
    last: bool
    spans: tuple[Span, ...]
    extents: tuple[Extent, ...]


# Bytes of each tensor of a bucket that are wanted, in order, by the tensor's number in the bucket.
Wanted = Mapping[int, Sequence[tuple[int, int]]]


def chunks_of(index: int, bucket: Bucket, limit: int, wanted: Wanted | None = None) -> Iterator[Chunk]:
    """Yield the chunks of bucket number ``index``, of at most ``limit`` bytes each; the last may be empty.

    ``wanted``: None for all bytes. Raises PlanError if a row of a tensor that is split by columns is larger.
    """
    start, used, spans, extents = 0, 0, list[Span](), list[Extent]()
    for number, (first, end) in _ranges(bucket, wanted):
        tensor, unit, begin = bucket[number], _unit(bucket[number]), first
        if unit > limit:
            raise PlanError(f"{tensor.name}: a row of {unit} bytes does not fit into {limit} bytes")
        while begin < end:
            take = min(end - begin, (limit - used) // unit * unit)
            if not take:
                yield Chunk(index, start, used, False, tuple(spans), tuple(extents))
                start, used, spans, extents = start + used, 0, [], []
                continue
            spans.append(Span(number, begin, take, used))
            for rank, part in tensor.pieces:
                extents += _extents(tensor, rank, part, begin, take, used)
            begin, used = begin + take, used + take
    yield Chunk(index, start, used, True, tuple(spans), tuple(extents))


def _ranges(bucket: Bucket, wanted: Wanted | None) -> Iterator[tuple[int, tuple[int, int]]]:
    for number, tensor in enumerate(bucket):
        ranges = [(0, nbytes(tensor))] if wanted is None else wanted.get(number, ())
        yield from ((number, each) for each in ranges)


def whole_pieces(tensor: TensorPlan, ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the bytes of ``tensor`` to read so that ``ranges`` of it can be verified, in order.

    The trainers publish digests of pieces of their slices, so these are read whole; of a tensor that is split
    by columns all is read, because its pieces do not end between rows.
    """
    if not ranges:
        return []
    if _outer(tensor) > 1:
        return [(0, nbytes(tensor))]
    result: list[tuple[int, int]] = []
    line = nbytes(tensor) // tensor.shape[tensor.pieces[0][1].dim] if len(tensor.pieces) > 1 else 0
    for _, part in tensor.pieces:
        first = part.offset * line
        for begin, end in ranges:
            low, high = max(begin - first, 0), min(end - first, part.nbytes)
            if low < high:
                low, high = low // PIECE * PIECE, min(-(-high // PIECE) * PIECE, part.nbytes)
                _append(result, first + low, first + high)
    return result


def _append(ranges: list[tuple[int, int]], begin: int, end: int) -> None:
    """Add a range that begins no earlier than the last one; ranges that touch become one."""
    if ranges and begin <= ranges[-1][1]:
        ranges[-1] = ranges[-1][0], max(ranges[-1][1], end)
    else:
        ranges.append((begin, end))


def _outer(tensor: TensorPlan) -> int:
    """Return the number of rows that each piece has a part of; 1 if the pieces follow each other."""
    dim = tensor.pieces[0][1].dim
    return math.prod(tensor.shape[:dim]) if len(tensor.pieces) > 1 else 1


def _unit(tensor: TensorPlan) -> int:
    """Return the bytes between which the tensor may be cut."""
    outer = _outer(tensor)
    return nbytes(tensor) // outer if outer > 1 else 1


def _extents(tensor: TensorPlan, rank: int, part: Slice, begin: int, take: int, at: int) -> Iterator[Extent]:
    """Yield the extent of a piece in bytes ``begin`` to ``begin + take`` of its tensor, if it has one.

    ``at``: byte of the chunk where byte ``begin`` is.
    """
    outer, whole = _outer(tensor), nbytes(tensor)
    line = whole // outer
    first = part.offset * (line // tensor.shape[part.dim]) if len(tensor.pieces) > 1 else 0
    if outer == 1:
        low, high = max(begin, first), min(begin + take, first + part.nbytes)
        inside, size, row = low - first, high - low, high - low
        at, stride = at + low - begin, row
    else:
        row, stride = part.nbytes // outer, line
        inside, size = begin // line * row, take // line * row
        at += first
    if size > 0:
        yield Extent(rank, part.start, part.start + inside, size, at, row, stride)
