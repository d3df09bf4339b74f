"""Staged version: one complete version in the agent's host memory, packed into buckets as it is sent."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from grpo_worker.weightsync.protocol.buffers import dtype_of
from grpo_worker.weightsync.protocol.digest import digest
from grpo_worker.weightsync.protocol.direct_load import DirectLoad
from grpo_worker.weightsync.protocol.fingerprint import fingerprint
from grpo_worker.weightsync.protocol.tiling import Plan, TensorPlan
from grpo_worker.weightsync.protocol.transfer_plan import (
    Message,
    TransferBucket,
    bucketed_id,
    make_transfer_plan,
    nbytes,
)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors of one bucket.

    ``flat``: their bytes in order, uint8 [bytes]. ``fingerprint``: of these bytes.
    ``messages``: fingerprints of the messages that the trainer ranks would send in a direct transfer.
    """

    tensors: tuple[TensorPlan, ...]
    flat: torch.Tensor = field(repr=False)
    fingerprint: int
    messages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StagedVersion:
    """A version in host memory. ``digests``: of the ranks' blobs that it was assembled from."""

    plan: Plan
    digests: list[str]
    buckets: tuple[Bucket, ...]

    @property
    def nbytes(self) -> int:
        return sum(len(bucket.flat) for bucket in self.buckets)

    def direct_load(self) -> DirectLoad:
        """Return the request that announces these buckets."""
        counts = tuple(len(bucket.tensors) for bucket in self.buckets)
        fingerprints = tuple(bucket.fingerprint for bucket in self.buckets)
        plan_id = bucketed_id(self.plan, [bucket.tensors for bucket in self.buckets])
        return DirectLoad(plan_id, counts, fingerprints)

    def checksum(self) -> str:
        """Return the checksum of all bytes; a direct transfer of the same version gives the same one."""
        return checksum_of([value for bucket in self.buckets for value in bucket.messages])


def checksum_of(fingerprints: Sequence[int]) -> str:
    """Return the checksum of a version from its messages' fingerprints."""
    return digest(json.dumps(list(fingerprints)).encode())


def assemble(
    plan: Plan,
    digests: list[str],
    blobs: Mapping[int, torch.Tensor],
    limit: int,
    reused: StagedVersion | None = None,
) -> StagedVersion:
    """Assemble a version from the ranks' blobs (uint8 [bytes]).

    ``limit``: bytes of a bucket. ``reused``: a version that is no longer needed; its memory is overwritten,
    because first writes to new memory take longer than the copy. Raises PlanError if a tensor would not be
    aligned to its dtype.
    """
    old = reused.buckets if reused is not None and reused.plan.plan_id == plan.plan_id else ()
    buckets = []
    for index, bucket in enumerate(make_transfer_plan(plan, limit).buckets):
        size = sum(map(nbytes, bucket.tensors))
        flat = old[index].flat if old else torch.empty(size, dtype=torch.uint8)
        _fill(flat, bucket.tensors, blobs)
        whole = int(fingerprint(flat))
        messages = [
            whole if message.nbytes == size else int(fingerprint(_message_bytes(flat, bucket, message)))
            for message in bucket.messages
        ]
        buckets.append(Bucket(bucket.tensors, flat, whole, tuple(messages)))
    return StagedVersion(plan, digests, tuple(buckets))


def _fill(flat: torch.Tensor, tensors: Sequence[TensorPlan], blobs: Mapping[int, torch.Tensor]) -> None:
    """Copy the slices of ``tensors`` from the blobs to their positions in a bucket."""
    start = 0
    for tensor in tensors:
        dtype, size = dtype_of(tensor.dtype), nbytes(tensor)
        whole = flat[start : start + size].view(dtype).view(tensor.shape)
        for rank, part in tensor.pieces:
            target = whole.narrow(part.dim, part.offset, part.length)
            target.copy_(blobs[rank][part.start : part.start + part.nbytes].view(dtype).view(target.shape))
        start += size


def _message_bytes(flat: torch.Tensor, bucket: TransferBucket, message: Message) -> torch.Tensor:
    """Return the bytes that a rank would send of a bucket, uint8 [bytes of the message]."""
    if message.start is not None:
        return flat[message.start : message.start + message.nbytes]
    starts = [0, *accumulate(map(nbytes, bucket.tensors))]
    pieces = []
    for piece in message.pieces:
        tensor, start = bucket.tensors[piece.tensor], starts[piece.tensor]
        whole = flat[start : start + nbytes(tensor)].view(dtype_of(tensor.dtype)).view(tensor.shape)
        shard = whole.narrow(piece.dim, piece.offset, piece.length)
        pieces.append(shard.contiguous().flatten().view(torch.uint8))
    return torch.cat(pieces)
