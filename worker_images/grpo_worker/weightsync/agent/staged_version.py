"""One version, whole, in a pod's memory, laid out as it is sent into the engine."""

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
    """Tensors of one request. ``flat``: their bytes in order, uint8 [bytes], and their fingerprint.
    ``messages``: those of what each rank would send of it over a link."""

    tensors: tuple[TensorPlan, ...]
    flat: torch.Tensor = field(repr=False)
    fingerprint: int
    messages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StagedVersion:
    """The pool's current version. ``digests``: of the ranks' blobs that it was made of."""

    plan: Plan
    digests: list[str]
    buckets: tuple[Bucket, ...]

    @property
    def nbytes(self) -> int:
        return sum(len(bucket.flat) for bucket in self.buckets)

    def direct_load(self) -> DirectLoad:
        """The announcement of these buckets."""
        counts = tuple(len(bucket.tensors) for bucket in self.buckets)
        fingerprints = tuple(bucket.fingerprint for bucket in self.buckets)
        plan_id = bucketed_id(self.plan, [bucket.tensors for bucket in self.buckets])
        return DirectLoad(plan_id, counts, fingerprints)

    def checksum(self) -> str:
        """Of all bytes; the same as of an engine that has taken them over a link."""
        return checksum_of([value for bucket in self.buckets for value in bucket.messages])


def checksum_of(fingerprints: Sequence[int]) -> str:
    """Of a version whose messages have these fingerprints, however they came."""
    return digest(json.dumps(list(fingerprints)).encode())


def assemble(
    plan: Plan,
    digests: list[str],
    blobs: Mapping[int, torch.Tensor],
    limit: int,
    spare: StagedVersion | None = None,
) -> StagedVersion:
    """Put the slices of the ranks' blobs (uint8) in their places.

    ``limit``: bytes of a bucket. ``spare``: a copy that nobody needs any more; its memory is used
    again, because the first touch of fresh memory takes longer than the copying.
    Raises PlanError when a tensor's place would not be aligned to its elements.
    """
    old = spare.buckets if spare is not None and spare.plan.plan_id == plan.plan_id else ()
    found = []
    for index, bucket in enumerate(make_transfer_plan(plan, limit).buckets):
        size = sum(map(nbytes, bucket.tensors))
        flat = old[index].flat if old else torch.empty(size, dtype=torch.uint8)
        _fill(flat, bucket.tensors, blobs)
        whole = int(fingerprint(flat))
        messages = [
            whole if message.nbytes == size else int(fingerprint(_message(flat, bucket, message)))
            for message in bucket.messages
        ]
        found.append(Bucket(bucket.tensors, flat, whole, tuple(messages)))
    return StagedVersion(plan, digests, tuple(found))


def _fill(flat: torch.Tensor, tensors: Sequence[TensorPlan], blobs: Mapping[int, torch.Tensor]) -> None:
    start = 0
    for tensor in tensors:
        dtype, size = dtype_of(tensor.dtype), nbytes(tensor)
        whole = flat[start : start + size].view(dtype).view(tensor.shape)
        for rank, part in tensor.pieces:
            to = whole.narrow(part.dim, part.offset, part.length)
            to.copy_(blobs[rank][part.start : part.start + part.nbytes].view(dtype).view(to.shape))
        start += size


def _message(flat: torch.Tensor, bucket: TransferBucket, message: Message) -> torch.Tensor:
    """What a rank would send of a bucket, uint8 [bytes of the message]."""
    if message.start is not None:
        return flat[message.start : message.start + message.nbytes]
    starts = [0, *accumulate(map(nbytes, bucket.tensors))]
    pieces = []
    for piece in message.pieces:
        tensor, start = bucket.tensors[piece.tensor], starts[piece.tensor]
        whole = flat[start : start + nbytes(tensor)].view(dtype_of(tensor.dtype)).view(tensor.shape)
        box = whole.narrow(piece.dim, piece.offset, piece.length)
        pieces.append(box.contiguous().flatten().view(torch.uint8))
    return torch.cat(pieces)
