"""Transfer plan: the messages that each trainer rank sends for each bucket. Pure."""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from grpo_worker.weightsync.protocol.bucketing import buckets
from grpo_worker.weightsync.protocol.buffers import MARGIN, dtype_of, item_bytes
from grpo_worker.weightsync.protocol.tiling import Plan, PlanError, TensorPlan

if TYPE_CHECKING:  # rollout agents import no torch
    import torch


@dataclass(frozen=True, slots=True)
class Piece:
    """Slice of a tensor in a message. ``tensor``: index in the bucket. ``nbytes``: size in the message."""

    tensor: int
    dim: int
    offset: int
    length: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Message:
    """Bytes that trainer rank ``source`` sends for a bucket at once: its pieces without gaps.

    ``start``: byte of the bucket where the message is received in place. None: it is received into scratch
    memory, and its pieces are scattered into the bucket. A rank sends the tensors that it holds completely
    and its shards of split tensors in separate messages.
    """

    source: int
    start: int | None
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class TransferBucket:
    """Tensors of one bucket, packed without gaps, and the messages that fill it."""

    tensors: tuple[TensorPlan, ...]
    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """All buckets of a version. ``plan_id``: hash of names, shapes, shards and buckets."""

    plan_id: str
    buckets: tuple[TransferBucket, ...]

    @property
    def tensors(self) -> list[TensorPlan]:
        return [tensor for bucket in self.buckets for tensor in bucket.tensors]

    @property
    def nbytes(self) -> int:
        return sum(message.nbytes for bucket in self.buckets for message in bucket.messages)


def make_transfer_plan(plan: Plan, limit: int) -> TransferPlan:
    """Divide a plan into buckets, each of which needs at most ``limit`` bytes at its receiver.

    The limit includes scratch memory and holds for every transport. A tensor that needs more has a bucket of
    its own. Raises PlanError for a piece that would not be aligned to its dtype.
    """
    limit -= limit // MARGIN
    made = [TransferBucket(tensors, _messages(tensors)) for tensors in _bucketed(plan, limit)]
    return TransferPlan(bucketed_id(plan, [bucket.tensors for bucket in made]), tuple(made))


def _bucketed(plan: Plan, limit: int) -> list[tuple[TensorPlan, ...]]:
    by_name = {tensor.name: tensor for tensor in plan.tensors}
    # Shards of a split tensor are received into scratch memory, so the tensor counts twice.
    sizes = {name: nbytes(tensor) * (2 if _split(tensor) else 1) for name, tensor in by_name.items()}
    return [tuple(by_name[name] for name in names) for names in buckets(plan.tensors, sizes, limit)]


def bucketed_id(plan: Plan, tensors_of_buckets: Sequence[Sequence[TensorPlan]]) -> str:
    """Return the id of a plan and its division into buckets."""
    names = [[tensor.name for tensor in bucket] for bucket in tensors_of_buckets]
    return f"{plan.plan_id}-{hashlib.sha256(json.dumps(names).encode()).hexdigest()[:8]}"


def nbytes(tensor: TensorPlan) -> int:
    """Return the bytes of the whole tensor."""
    return math.prod(tensor.shape) * item_bytes(tensor.dtype)


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
    return tuple(_message(rank, tuple(own), tensors, starts) for (rank, _), own in sorted(pieces.items()))


def _message(
    rank: int, pieces: tuple[Piece, ...], tensors: Sequence[TensorPlan], starts: Sequence[int]
) -> Message:
    """Build a message; it is received in place if all its pieces are at one distance from their targets."""
    position, message_starts = 0, []
    for piece in pieces:
        tensor = tensors[piece.tensor]
        size = item_bytes(tensor.dtype)
        if position % size or starts[piece.tensor] % size:
            raise PlanError(f"{tensor.name}: byte {position} is not aligned to {tensor.dtype}")
        # Rows of a tensor are contiguous in its memory; columns are not.
        rows = piece.dim == 0 or piece.length == tensor.shape[piece.dim]
        row = nbytes(tensor) // tensor.shape[piece.dim] if piece.dim == 0 else 0
        message_starts.append(starts[piece.tensor] + piece.offset * row - position if rows else None)
        position += piece.nbytes
    in_place = message_starts[0] is not None and len(set(message_starts)) == 1
    return Message(rank, message_starts[0] if in_place else None, pieces)


ShardKey = tuple[str, int]  # tensor name, and offset of the shard along its dimension


def piece_views(
    data: "torch.Tensor", bucket: TransferBucket, message: Message
) -> "list[tuple[ShardKey, torch.Tensor]]":
    """Return a view of each piece, with its dtype and shape, in ``data`` (uint8 [bytes of the message])."""
    views, start = [], 0
    for piece in message.pieces:
        tensor = bucket.tensors[piece.tensor]
        shape = list(tensor.shape)
        shape[piece.dim] = piece.length
        view = data[start : start + piece.nbytes].view(dtype_of(tensor.dtype)).view(shape)
        views.append(((tensor.name, piece.offset), view))
        start += piece.nbytes
    return views
