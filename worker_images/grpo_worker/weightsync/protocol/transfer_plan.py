"""What each trainer rank sends for each bucket, and where it belongs there (pure)."""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from grpo_worker.weightsync.protocol.bucketing import buckets
from grpo_worker.weightsync.protocol.buffers import MARGIN, dtype_of
from grpo_worker.weightsync.protocol.tiling import Plan, PlanError, TensorPlan


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of tensor number ``tensor`` of the bucket; it takes ``nbytes`` of the message."""

    tensor: int
    dim: int
    offset: int
    length: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Message:
    """What trainer rank ``source`` sends at once for a bucket: pieces without gaps.

    ``start``: the byte of the bucket at which the whole message belongs, as it is; None when its pieces
    must be dealt out. A rank's whole tensors and its pieces of others are messages of their own.
    """

    source: int
    start: int | None
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class TransferBucket:
    """Tensors of one bucket, which lie in it without gaps, and who sends what of it."""

    tensors: tuple[TensorPlan, ...]
    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """All buckets of a version. Same ``plan_id``: same names, shapes, shards and buckets."""

    plan_id: str
    buckets: tuple[TransferBucket, ...]

    @property
    def tensors(self) -> list[TensorPlan]:
        return [tensor for bucket in self.buckets for tensor in bucket.tensors]

    @property
    def nbytes(self) -> int:
        return sum(message.nbytes for bucket in self.buckets for message in bucket.messages)


def make_transfer_plan(plan: Plan, limit: int) -> TransferPlan:
    """Buckets of which each takes at most ``limit`` bytes where it is received, whichever way they travel.
    A tensor that takes more has a bucket of its own.

    Raises PlanError for a piece that would not be aligned.
    """
    limit -= limit // MARGIN
    found = [TransferBucket(tensors, _messages(tensors)) for tensors in _bucketed(plan, limit)]
    return TransferPlan(bucketed_id(plan, [bucket.tensors for bucket in found]), tuple(found))


def _bucketed(plan: Plan, limit: int) -> list[tuple[TensorPlan, ...]]:
    by_name = {tensor.name: tensor for tensor in plan.tensors}
    # The pieces of one that several ranks hold are received beside it.
    sizes = {name: nbytes(tensor) * (2 if _split(tensor) else 1) for name, tensor in by_name.items()}
    return [tuple(by_name[name] for name in names) for names in buckets(plan.tensors, sizes, limit)]


def bucketed_id(plan: Plan, found: Sequence[Sequence[TensorPlan]]) -> str:
    """Name of the plan together with its buckets: what stands where in them."""
    names = [[tensor.name for tensor in bucket] for bucket in found]
    return f"{plan.plan_id}-{hashlib.sha256(json.dumps(names).encode()).hexdigest()[:8]}"


def nbytes(tensor: TensorPlan) -> int:
    """Bytes of the whole tensor."""
    return math.prod(tensor.shape) * dtype_of(tensor.dtype).itemsize


def _split(tensor: TensorPlan) -> bool:
    return len({rank for rank, _ in tensor.pieces}) > 1


def _messages(tensors: Sequence[TensorPlan]) -> tuple[Message, ...]:
    pieces: dict[tuple[int, bool], list[Piece]] = {}
    for index, tensor in enumerate(tensors):
        split = _split(tensor)
        for rank, part in tensor.pieces:
            piece = Piece(index, part.dim, part.offset, part.length, part.nbytes)
            pieces.setdefault((rank, split), []).append(piece)
    starts, start = [], 0
    for tensor in tensors:
        starts.append(start)
        start += nbytes(tensor)
    return tuple(_message(rank, tuple(found), tensors, starts) for (rank, _), found in sorted(pieces.items()))


def _message(
    rank: int, pieces: tuple[Piece, ...], tensors: Sequence[TensorPlan], starts: Sequence[int]
) -> Message:
    place, at = 0, []
    for piece in pieces:
        tensor = tensors[piece.tensor]
        size = dtype_of(tensor.dtype).itemsize
        if place % size or starts[piece.tensor] % size:
            raise PlanError(f"{tensor.name}: byte {place} is not aligned to {tensor.dtype}")
        # Rows of a tensor are one stretch of its memory; columns are not.
        rows = piece.dim == 0 or piece.length == tensor.shape[piece.dim]
        row = nbytes(tensor) // tensor.shape[piece.dim] if piece.dim == 0 else 0
        at.append(starts[piece.tensor] + piece.offset * row - place if rows else None)
        place += piece.nbytes
    whole = at[0] is not None and len(set(at)) == 1
    return Message(rank, at[0] if whole else None, pieces)


Box = tuple[str, int]  # name and offset of a shard


def places(
    message_bytes: torch.Tensor, bucket: TransferBucket, message: Message
) -> list[tuple[Box, torch.Tensor]]:
    """Where each piece stands in its message, uint8 [bytes of the message]."""
    found, start = [], 0
    for piece in message.pieces:
        tensor = bucket.tensors[piece.tensor]
        shape = list(tensor.shape)
        shape[piece.dim] = piece.length
        view = message_bytes[start : start + piece.nbytes].view(dtype_of(tensor.dtype)).view(shape)
        found.append(((tensor.name, piece.offset), view))
        start += piece.nbytes
    return found
