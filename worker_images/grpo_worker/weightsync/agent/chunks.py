"""Chunks of a version: the unit in which an agent fetches it and sends it on. Pure.

A bucket has the size that suits its receiver; its largest tensor decides. A chunk is a part of a bucket that
is small enough for the agent's memory. A tensor that is split by columns is cut between its rows, so that a
chunk needs one range of each rank's blob.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from grpo_worker.weightsync.protocol.manifest import Slice
from grpo_worker.weightsync.protocol.tiling import PlanError, TensorPlan
from grpo_worker.weightsync.protocol.transfer_plan import Bucket, bucket_bytes, nbytes

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
class Chunk:
    """``nbytes`` bytes of bucket ``bucket``, from its byte ``start`` on.

    ``last``: they complete the bucket.
    """

    bucket: int
    start: int
    nbytes: int
    last: bool
    extents: tuple[Extent, ...]


def chunks_of(index: int, bucket: Bucket, limit: int) -> Iterator[Chunk]:
    """Yield the chunks of bucket number ``index``, of at most ``limit`` bytes each.

    Raises PlanError if a row of a tensor that is split by columns is larger.
    """
    size, start, used, extents = bucket_bytes(bucket), 0, 0, list[Extent]()
    for tensor in bucket:
        begin, end, unit = 0, nbytes(tensor), _unit(tensor)
        if unit > limit:
            raise PlanError(f"{tensor.name}: a row of {unit} bytes does not fit into {limit} bytes")
        while begin < end:
            take = min(end - begin, (limit - used) // unit * unit)
            if not take:
                yield Chunk(index, start, used, False, tuple(extents))
                start, used, extents = start + used, 0, []
                continue
            for rank, part in tensor.pieces:
                extents += _extents(tensor, rank, part, begin, take, used)
            begin, used = begin + take, used + take
    yield Chunk(index, start, size - start, True, tuple(extents))


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
