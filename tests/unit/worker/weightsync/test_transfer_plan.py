"""Buckets of a staged version: every tensor once, within the limit, aligned; equal plans have equal ids."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_worker.quantization.fp8 import Part, quantised_parts
from grpo_worker.weightsync.protocol.bucketing import buckets
from grpo_worker.weightsync.protocol.manifest import layout
from grpo_worker.weightsync.protocol.tiling import PlanError, make_plan
from grpo_worker.weightsync.protocol.transfer_plan import bucket_bytes
from support.transfer_cases import RANKS, cut_tensors, parts_of, transfer_plan

MIB = 1 << 20


@given(cuts=cut_tensors, limit=st.integers(16, 600))
def test_every_tensor_is_in_one_bucket_within_its_limit(
    cuts: dict[str, tuple[list[int], int, int]], limit: int
) -> None:
    parts, whole = parts_of(cuts)
    planned = transfer_plan(parts, limit)
    assert sorted(tensor.name for tensor in planned.tensors) == sorted(whole)
    assert planned.nbytes == sum(tensor.nbytes for tensor in whole.values())
    assert all(bucket_bytes(bucket) <= limit or len(bucket) == 1 for bucket in planned.buckets)


def test_several_ranks_contribute_to_a_bucket() -> None:
    """Their hosts can then send in parallel."""
    parts: list[list[Part]] = [
        [(f"r{rank}.{n}", (64, 1), 0, 0, torch.zeros(64, 1)) for n in range(8)] for rank in range(RANKS)
    ]
    plan = make_plan([layout(rank, RANKS, found) for rank, found in enumerate(parts)])
    groups = buckets(plan.tensors, {t.name: 32 * MIB for t in plan.tensors}, 192 * MIB)
    assert [sorted({name[:2] for name in group}) for group in groups] == [["r0", "r1", "r2"]] * 4


def test_a_tensor_in_fp8_travels_with_its_scales() -> None:
    name = "model.layers.0.mlp.experts.0.up_proj.weight"
    parts: list[list[Part]] = [[], [], []]
    for rank in (0, 1):
        parts[rank].append((name, (256, 128), 0, 128 * rank, torch.randn(128, 128)))
    planned = transfer_plan([list(quantised_parts(p)) for p in parts], MIB)
    assert [tensor.name for tensor in planned.tensors] == [name, f"{name}_scale_inv"]


def test_a_misaligned_tensor_is_refused() -> None:
    parts: list[list[Part]] = [[] for _ in range(RANKS)]
    parts[0] = [("a", (1,), 0, 0, torch.zeros(1, dtype=torch.bfloat16)), ("b", (1,), 0, 0, torch.zeros(1))]
    with pytest.raises(PlanError, match="b: byte 2 is not aligned to float32"):
        transfer_plan(parts, MIB)


def test_plans_with_different_buckets_have_different_ids() -> None:
    parts: list[list[Part]] = [[] for _ in range(RANKS)]
    parts[0] = [(name, (4,), 0, 0, torch.zeros(4)) for name in "ab"]
    assert transfer_plan(parts, 64).plan_id == transfer_plan(parts, 64).plan_id
    assert transfer_plan(parts, 64).plan_id != transfer_plan(parts, 16).plan_id
