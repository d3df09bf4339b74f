"""What stand-in members of a link tell each other, beside what the worker's own code would send."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from grpo_operator.api.catalog.architectures import architecture
from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.api.weight_path import Backend
from grpo_rehearsal.standins.links import GangLinks, Store, kept_regions
from grpo_rehearsal.standins.weight_layouts import layouts, packed
from grpo_worker.quantization.fp8 import Part
from grpo_worker.weightsync.planner.boxes import needed_regions
from grpo_worker.weightsync.planner.layouts import EngineShape, engine_side, tensors_of
from grpo_worker.weightsync.protocol.buffers import dtype_of
from grpo_worker.weightsync.protocol.link_exchange import LinkExchange
from grpo_worker.weightsync.protocol.link_offer import LinkOffer
from grpo_worker.weightsync.protocol.manifest import Slice
from grpo_worker.weightsync.trainer.links import TrainerLinks

HF: dict[str, Any] = architecture("deepseek-v3") | {
    "num_hidden_layers": 4, "first_k_dense_replace": 1, "n_routed_experts": 8, "num_nextn_predict_layers": 0,
}  # fmt: skip
LAYOUT = Layout(world=8, tensor=2, pipeline=2, expert=4)
ENGINE = EngineShape(tensor=4, expert=4)
OFFER = LinkOffer("link", "gang", "10.0.0.1", 29501, 8, 4, 2, Backend.NCCL, 256 << 20, 1, True)


def part(of: Slice) -> Part:
    shape = [of.length if dim == of.dim else size for dim, size in enumerate(of.shape)]
    return of.name, of.shape, of.dim, of.offset, torch.empty(shape, dtype=dtype_of(of.dtype), device="meta")


@pytest.mark.parametrize("fp8", [False, True])
def test_the_layouts_are_packed_as_the_ranks_pack_them(fp8: bool) -> None:
    sent: list[bytes] = []

    def gather(own: bytes) -> Sequence[bytes]:
        sent.append(own)
        return []

    for rank, slices in enumerate(layouts(HF, LAYOUT, fp8=False)):
        TrainerLinks(rank, LAYOUT.world, torch.device("cpu"), gather).exchange_layouts(
            [part(each) for each in slices], fp8
        )
    assert sent == [packed(slices) for slices in layouts(HF, LAYOUT, fp8)]
    links = GangLinks(HF, LAYOUT, ENGINE)
    assert links.exchange_layouts(fp8) == links.layout_bytes == sum(map(len, sent[1:]))
    assert links.knows_layouts(fp8) and not links.knows_layouts(not fp8)


def test_a_join_has_the_bytes_that_the_members_read_and_leave() -> None:
    links = GangLinks(HF, LAYOUT, ENGINE)
    links.exchange_layouts(True)
    join = links.join(OFFER)
    assert join.problem == "" and join.table > 0 and join.sends > 0 and join.receives > join.sends / 4
    store = Store()
    for rank, kept in kept_regions(HF, ENGINE, tensors_of(HF, True)).items():
        LinkExchange(store).put_kept(rank, kept)
    assert join.kept == sum(map(len, store.values()))
    assert links.join(replace(OFFER, name="another", port=1)) is join, "an equal engine has the same plan"
    assert links.join(replace(OFFER, bucket_bytes=512 << 20)) is not join
    assert len(links.joins) == 2


def test_a_join_has_the_waves_of_the_plan_for_the_offered_number_of_links() -> None:
    links = GangLinks(HF, LAYOUT, ENGINE)
    assert links.waves == ()
    links.exchange_layouts(True)
    few = links.join(OFFER).waves
    assert links.waves == few and max(few) <= 2 * OFFER.bucket_bytes
    many = links.join(replace(OFFER, links=8)).waves
    assert len(many) > len(few) > 1 and max(many) < max(few), "the links share the memory for sending"
    assert links.waves == few, "the plan with the longest waves"


def test_engines_keep_what_they_need_whole_blocks_of_it_in_fp8() -> None:
    for fp8 in (False, True):
        tensors = tensors_of(HF, fp8)
        needed = {(n.tensor, n.gpus) for n in needed_regions(kept_regions(HF, ENGINE, tensors), tensors)}
        assert needed == {(n.tensor, n.gpus) for n in engine_side(HF, ENGINE, 1)}


def test_an_engine_that_cannot_be_planned_names_the_reason() -> None:
    links = GangLinks(HF, LAYOUT, ENGINE)
    links.exchange_layouts(True)
    join = links.join(replace(OFFER, bucket_bytes=1 << 10))
    assert "cannot hold an atom" in join.problem and join.receives == 0
