"""Transfer plan: the buckets in which a staged version is streamed into an engine. Pure."""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from grpo_worker.weightsync.protocol.bucketing import buckets
from grpo_worker.weightsync.protocol.buffers import MARGIN, item_bytes
from grpo_worker.weightsync.protocol.tiling import Plan, PlanError, TensorPlan

Bucket = tuple[TensorPlan, ...]  # tensors, which are packed without gaps


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """All buckets of a version. ``plan_id``: hash of names, shapes, shards and buckets."""

    plan_id: str
    buckets: tuple[Bucket, ...]

    @property
    def tensors(self) -> list[TensorPlan]:
        return [tensor for bucket in self.buckets for tensor in bucket]

    @property
    def nbytes(self) -> int:
        return sum(map(bucket_bytes, self.buckets))


def make_transfer_plan(plan: Plan, limit: int) -> TransferPlan:
    """Divide a plan into buckets of at most ``limit`` bytes; a larger tensor has a bucket of its own.

    Raises PlanError for a tensor that would not be aligned to its dtype.
    """
    by_name = {tensor.name: tensor for tensor in plan.tensors}
    sizes = {name: nbytes(tensor) for name, tensor in by_name.items()}
    groups = buckets(plan.tensors, sizes, limit - limit // MARGIN)
    made = tuple(tuple(by_name[name] for name in names) for names in groups)
    for bucket in made:
        _check_alignment(bucket)
    names_id = hashlib.sha256(json.dumps(groups).encode()).hexdigest()[:8]
    return TransferPlan(f"{plan.plan_id}-{names_id}", made)


def nbytes(tensor: TensorPlan) -> int:
    """Return the bytes of the whole tensor."""
    return math.prod(tensor.shape) * item_bytes(tensor.dtype)


def bucket_bytes(bucket: Bucket) -> int:
    """Return the bytes of all tensors of a bucket."""
    return sum(map(nbytes, bucket))


def _check_alignment(bucket: Sequence[TensorPlan]) -> None:
    start = 0
    for tensor in bucket:
        if start % item_bytes(tensor.dtype):
            raise PlanError(f"{tensor.name}: byte {start} is not aligned to {tensor.dtype}")
        start += nbytes(tensor)
