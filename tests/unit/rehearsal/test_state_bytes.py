"""Bytes of the state that ranks save and read, beside the planner's."""

from typing import Any

import pytest

from grpo_operator.api.catalog.architectures import architecture
from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.plan.planner.model import parameters
from grpo_operator.plan.planner.model.shape import ModelShape
from grpo_operator.plan.planner.training.activations import Workload
from grpo_operator.plan.planner.training.memory import stage_memory
from grpo_operator.plan.planner.training.rank_parameters import CHUNK as PLANNED_CHUNK
from grpo_operator.plan.planner.transfer_bounds import checkpoint_bytes
from grpo_rehearsal.standins.state_bytes import STATE, WEIGHTS, StateBytes
from grpo_worker.megatron.checkpoint.pieces import CHUNK

HF: dict[str, Any] = architecture("deepseek-v3") | {
    "num_hidden_layers": 4, "first_k_dense_replace": 1, "n_routed_experts": 8, "num_nextn_predict_layers": 0,
}  # fmt: skip
LAYOUT = Layout(world=16, tensor=2, pipeline=2, expert=4)  # four replicas, two of each expert
SHAPE = ModelShape.from_hf(HF)
BIAS = 3 * 8  # values of the routers' biases, which the planner leaves out


def test_a_checkpoint_has_the_planners_bytes_each_value_once() -> None:
    written = StateBytes.of(HF, LAYOUT, per_node=4).written(STATE)
    assert 0 <= written.total - checkpoint_bytes(SHAPE) <= BIAS * sum(STATE)
    assert written.total / 4 < written.node < 0.4 * written.total, "four nodes share the optimizer state"
    assert written.node / 4 < written.rank < written.node / 2


def test_the_fullest_rank_writes_what_the_planner_expects() -> None:
    written = StateBytes.of(HF, LAYOUT, per_node=4).written(STATE)
    stages = stage_memory(SHAPE, LAYOUT, Workload(1, 128))
    assert max(stage.saved for stage in stages) == pytest.approx(written.rank, abs=12 * CHUNK)


def test_ranks_read_and_save_the_optimizer_state_of_chunks_that_they_keep() -> None:
    state = StateBytes.of(HF, LAYOUT, per_node=4)
    owned = sum(sum(rank.owned) for rank in state.ranks)
    assert owned - parameters.total(SHAPE).total == pytest.approx(BIAS, abs=BIAS)
    for rank in state.ranks:
        assert sum(rank.owned) <= sum(rank.touched) < 0.6 * sum(rank.held), (
            "and not the whole of their replicas"
        )


def test_the_planner_counts_the_chunks_that_ranks_save() -> None:
    assert PLANNED_CHUNK == CHUNK


def test_every_rank_reads_what_it_holds() -> None:
    read = StateBytes.of(HF, LAYOUT, per_node=4).read(WEIGHTS)
    count = parameters.total(SHAPE)
    copies = 2 * count.expert + 4 * (count.total - count.expert)
    cut = 2 * read.total / (2 * 2 * copies)
    assert 0.95 < cut < 1.1, "norms, routers and low-rank projections are whole on both tensor-parallel ranks"
    assert len(read.pieces) > 10 and max(read.pieces) == 2 * HF["vocab_size"] // 2 * HF["hidden_size"]


def test_seconds_are_bytes_by_the_speed_of_what_is_full() -> None:
    share = StateBytes.of(HF, LAYOUT, per_node=4).written(STATE)
    assert share.at_node_rate(5e9).seconds == pytest.approx(share.node / 5e9)
    assert share.at_rank_rate(2e9).seconds == pytest.approx(share.rank / 2e9)
    assert share.at_node_rate(5e9).count == share.rank


def test_a_version_in_fp8_before_the_state_has_half_the_bytes_of_bf16() -> None:
    written = StateBytes.of(HF, LAYOUT, per_node=4).written
    both = written(WEIGHTS).scaled(0.5).then(written(STATE))
    assert both.total == written(WEIGHTS).total // 2 + written(STATE).total
    assert both.node == written(WEIGHTS).node // 2 + written(STATE).node
    assert both.pieces[0] == written(WEIGHTS).pieces[0] // 2 and both.pieces[-1] == written(STATE).pieces[-1]
