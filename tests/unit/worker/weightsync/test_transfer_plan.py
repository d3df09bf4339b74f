"""Messages of trainer ranks for each bucket: every byte once, at its offset, in few pieces."""

import math
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_operator.api.weight_path import Backend
from grpo_worker.quantization.fp8 import Part, quantised_parts
from grpo_worker.weightsync.protocol.bucketing import buckets
from grpo_worker.weightsync.protocol.buffers import aligned
from grpo_worker.weightsync.protocol.direct_load import DirectLoad, direct_load_request
from grpo_worker.weightsync.protocol.group_offer import GroupOffer, check_plan, transfer_plan_of
from grpo_worker.weightsync.protocol.manifest import layout
from grpo_worker.weightsync.protocol.tiling import PlanError, make_plan
from grpo_worker.weightsync.protocol.transfer_plan import (
    TransferPlan,
    nbytes,
    piece_views,
)
from grpo_worker.weightsync.sglang_plugin.direct_receiver import DirectReceiver, GroupMember, scatter
from grpo_worker.weightsync.trainer.sender import Shards
from grpo_worker.weightsync.transport.rendezvous import TransferGroup
from support.transfer_cases import RANKS, cut_tensors, parts_of, specs, transfer_plan


def arrived(
    request: DirectLoad, sent: TransferPlan, parts: list[list[Part]], fp8: bool
) -> list[torch.Tensor]:
    """Return each bucket as an engine assembles it."""
    shards = [Shards(p, fp8) for p in parts]
    flats = []
    for briefs, bucket in zip(request.messages, sent.buckets, strict=True):
        flat = torch.zeros(sum(map(nbytes, bucket.tensors)), dtype=torch.uint8)
        for message, brief in zip(bucket.messages, briefs, strict=True):
            data = torch.zeros(message.nbytes, dtype=torch.uint8)
            shards[message.source].fill(piece_views(data, bucket, message))
            if brief.start is None:
                scatter(data, brief, flat, specs(bucket), [(0, brief.nbytes)])
            else:
                flat[brief.start : brief.start + brief.nbytes] = data
        flats.append(flat)
    return flats


@given(cuts=cut_tensors, limit=st.integers(16, 600))
def test_every_tensor_arrives_complete(cuts: dict[str, tuple[list[int], int, int]], limit: int) -> None:
    parts, whole = parts_of(cuts)
    sent = transfer_plan(parts, limit)
    request = DirectLoad.from_load_format(direct_load_request(sent, 5.0).to_load_format())
    assert (request.plan_id, request.timeout) == (sent.plan_id, 5.0)
    for bucket, flat in zip(sent.buckets, arrived(request, sent, parts, False), strict=True):
        wanted = torch.cat([whole[tensor.name].flatten() for tensor in bucket.tensors])
        assert torch.equal(flat.view(torch.float32), wanted)
    assert sent.nbytes == sum(math.prod(t.shape) * 4 for t in whole.values())


@given(cuts=cut_tensors, limit=st.integers(16, 600))
def test_tensors_of_one_rank_need_no_scatter(cuts: dict[str, tuple[list[int], int, int]], limit: int) -> None:
    alone = {name: ([sum(sizes)], dim, first) for name, (sizes, dim, first) in cuts.items()}
    sent = transfer_plan(parts_of(alone)[0], limit)
    assert all(message.start is not None for bucket in sent.buckets for message in bucket.messages)


@given(cuts=cut_tensors, limit=st.integers(1 << 16, 1 << 20))
def test_a_bucket_stays_within_its_limit_on_the_receiver(
    cuts: dict[str, tuple[list[int], int, int]], limit: int
) -> None:
    """Also if pieces are scattered; only a single larger tensor may exceed the limit."""
    larger = {
        name: ([512 * rows for rows in sizes], dim, first) for name, (sizes, dim, first) in cuts.items()
    }
    sent = transfer_plan(parts_of(larger)[0], limit)
    incoming = DirectReceiver(direct_load_request(sent, 5.0), GroupMember(cast(TransferGroup, None)), [])
    for index, bucket in enumerate(sent.buckets):
        taken = aligned(sum(map(nbytes, bucket.tensors))) + incoming.scratch_bytes(index)
        assert taken <= limit or len(bucket.tensors) == 1


def test_complete_tensors_stay_contiguous_beside_split_ones() -> None:
    parts: list[list[Part]] = [[], [], []]
    for rank in (0, 1):
        parts[rank] = [(f"whole.{rank}.{n}", (4, 4), 0, 0, torch.zeros(4, 4)) for n in range(3)]
        parts[rank].append(("split", (4, 8), 1, 4 * rank, torch.zeros(4, 4)))
    (bucket,) = transfer_plan(parts, 256 << 20).buckets
    found = {(m.source, m.start is None): len(m.pieces) for m in bucket.messages}
    assert found == {(0, False): 3, (1, False): 3, (0, True): 1, (1, True): 1}


def test_tensors_held_by_other_ranks_do_not_break_contiguity() -> None:
    """The loader needs both halves in one bucket; one is split and the other is not."""
    fused = "model.layers.1.self_attn"
    parts: list[list[Part]] = [[], [], []]
    parts[0] = [(f"model.layers.{n}.mlp.down_proj.weight", (4, 4), 0, 0, torch.zeros(4, 4)) for n in range(3)]
    parts[0].append((f"{fused}.kv_a_proj_with_mqa.weight", (4, 4), 0, 0, torch.zeros(4, 4)))
    for rank in (0, 1):
        parts[rank].append((f"{fused}.q_a_proj.weight", (4, 8), 1, 4 * rank, torch.zeros(4, 4)))
    (bucket,) = transfer_plan(parts, 1 << 20).buckets
    assert {(m.source, len(m.pieces)): m.start for m in bucket.messages} == {
        (0, 4): 0,
        (0, 1): None,
        (1, 1): None,
    }


def test_several_ranks_contribute_to_a_bucket() -> None:
    """They can then send in parallel."""
    parts: list[list[Part]] = [
        [(f"r{rank}.{n}", (64, 1), 0, 0, torch.zeros(64, 1)) for n in range(8)] for rank in range(RANKS)
    ]
    plan = make_plan([layout(rank, RANKS, found) for rank, found in enumerate(parts)])
    mib = 1 << 20
    groups = buckets(plan.tensors, {t.name: 32 * mib for t in plan.tensors}, 192 * mib)
    assert [sorted({name[:2] for name in group}) for group in groups] == [["r0", "r1", "r2"]] * 4


def test_a_shard_in_fp8_is_quantised_when_it_is_sent() -> None:
    name = "model.layers.0.mlp.experts.0.up_proj.weight"
    weight = torch.randn(256, 128)
    parts: list[list[Part]] = [[], [], []]
    for rank in (0, 1):
        parts[rank].append((name, (256, 128), 0, 128 * rank, weight[128 * rank : 128 * (rank + 1)]))
    quantised = [list(quantised_parts(p)) for p in parts]
    sent = transfer_plan(quantised, 1 << 20)
    assert [t.name for t in sent.tensors] == [name, f"{name}_scale_inv"]
    flats = arrived(direct_load_request(sent, 1.0), sent, parts, True)
    _, _, _, _, values = next(quantised_parts([(name, (256, 128), 0, 0, weight)]))
    assert torch.equal(flats[0][: 256 * 128], values.view(torch.uint8).flatten())


def test_a_misaligned_piece_is_refused() -> None:
    parts: list[list[Part]] = [[] for _ in range(RANKS)]
    parts[0] = [("a", (1,), 0, 0, torch.zeros(1, dtype=torch.bfloat16)), ("b", (1,), 0, 0, torch.zeros(1))]
    with pytest.raises(PlanError, match="b: byte 2 is not aligned to float32"):
        transfer_plan(parts, 1 << 20)


def test_plans_with_different_buckets_have_different_ids() -> None:
    layouts = [layout(0, 1, [("a", (4,), 0, 0, torch.zeros(4)), ("b", (4,), 0, 0, torch.zeros(4))]).to_json()]
    wanted = transfer_plan_of(layouts, 64).plan_id
    offer = GroupOffer("group", "10.0.0.1", 1234, 1235, 2, 1, Backend.GLOO, wanted, 64)
    check_plan(transfer_plan_of(layouts, 64), offer)
    with pytest.raises(PlanError, match=f"the offered one is {wanted}: use one release"):
        check_plan(transfer_plan_of(layouts, 16), offer)
