"""Search of ``parallelism: {auto: true}``: virtual stages, the margin, and how long it takes."""

import json
import time
from dataclasses import replace
from typing import Any

import pytest
import yaml

from grpo_devcluster.paths import REPO
from grpo_devcluster.results import RESULTS
from grpo_operator.api.catalog.architectures import architecture
from grpo_operator.api.catalog.gpus import GPUS, GpuType
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.plan.planner.model.shape import ModelShape
from grpo_operator.plan.planner.resolve import JobPlan, RefusedError, resolve
from grpo_operator.plan.planner.training.cost import Rows, call_cost
from grpo_operator.plan.planner.training.memory import stage_memory
from grpo_operator.plan.planner.training.search import (
    LOCAL_MARGIN,
    MARGIN,
    TrainingPool,
    candidates,
    choices,
    feasible,
    is_safe,
    worst,
)
from support.objects import pool_of

H100 = GPUS[GpuType.H100]
V3, QWEN3 = (ModelShape.from_hf(architecture(name)) for name in ("deepseek-v3", "qwen3-8b"))
POOL = TrainingPool(
    V3, H100, 512, 8, sequences=2048, sequence=16384, micro_batch=1, max_tokens=16384, sync_buffers=2**31
)
SECONDS = 5  # of one plan with everything left to the planner, on a busy machine


def _plan(manifest: str, **trainer: Any) -> JobPlan:
    body = yaml.safe_load((REPO / "manifests" / f"{manifest}.yaml").read_text())["spec"]
    body["trainer"] |= trainer
    spec = GRPOJobSpec.model_validate(body)
    return resolve(spec, pool_of(spec))


def test_the_margin_covers_the_errors_of_held_out_cases() -> None:
    figures = {
        name: json.loads((RESULTS / f"{name}.json").read_text())["figures"] for name in ("trainer", "planner")
    }
    error = figures["trainer"]["memory_too_low_pct_heldout_max"] / 100
    for gpu in GPUS.values():
        assert MARGIN * gpu.memory >= error * (gpu.usable - MARGIN * gpu.memory)
        local = figures["planner"]["memory_held_out_fused_error_pct_max"] / 100
        assert LOCAL_MARGIN * gpu.memory >= local * (gpu.usable - LOCAL_MARGIN * gpu.memory)


@pytest.mark.parametrize("recompute", ["full", "auto"])
def test_512_gpus_have_a_safe_layout_within_seconds(recompute: str) -> None:
    start = time.process_time()
    plan = _plan(
        "deepseek-v3-512xh100", nodes=64, parallelism={"auto": True}, recompute=recompute,
        offload={"parameters": True, "auto": True},
    )  # fmt: skip
    assert time.process_time() - start < SECONDS
    assert plan.layout.world == 512 and plan.training is not None
    assert worst(plan.stages).total <= plan.training.gpu.usable - 0.04 * H100.memory
    assert plan.layout.virtual_pipeline > 1


def test_the_large_manifest_is_not_planned_with_less_than_the_margin() -> None:
    plan = _plan("deepseek-v3-256xh100", parallelism={"auto": True})
    tight = Layout(192, 2, 12, 1, 16, layers_in_first_stage=6, layers_in_last_stage=5)
    assert plan.training is not None and tight in feasible(plan.training)
    assert not is_safe(plan.training, tight)
    assert plan.training.cost(tight).total < plan.training.cost(plan.layout).total, "it would be faster"
    assert worst(plan.stages).total <= plan.training.safe


def test_a_given_layout_that_leaves_little_is_run_with_a_note() -> None:
    sizes = {"tensor": 2, "pipeline": 12, "expert": 16, "layersInFirstStage": 6, "layersInLastStage": 5}
    plan = _plan("deepseek-v3-256xh100", parallelism=sizes)
    assert plan.reason.startswith("given; leaves 1.7 GB of each GPU of its fullest stage, less than the ")
    assert plan.reason.endswith("the 3.4 GB by which the planner can be wrong")
    assert _plan("deepseek-v3-512xh100").reason == "given"


def test_auto_names_the_layout_that_only_fits_without_the_margin() -> None:
    with pytest.raises(RefusedError) as error:
        _plan("deepseek-v3-512xh100", nodes=24, parallelism={"auto": True}, offload={})
    text = str(error.value)
    assert "auto: no layout of 192 GPUs leaves 3.4 GB of 79.5 GB free: give TP8 PP12 CP1 EP16 DP2" in text
    assert text.endswith("set spec.trainer.offload.auto, or use GPUs with more memory")


def test_local_kernels_have_a_wider_margin() -> None:
    local, fused = (_plan("qwen3-8b-8gpu", kernels=k).training for k in ("local", "transformer-engine"))
    assert local is not None and fused is not None
    assert (local.margin, fused.margin) == (LOCAL_MARGIN, MARGIN) and local.safe < fused.safe


def test_virtual_stages_are_searched_with_balanced_chunks() -> None:
    found = [layout for layout in candidates(POOL) if layout.virtual_pipeline > 1]
    assert {layout.virtual_pipeline for layout in found} == {2, 4, 8}
    assert all(layout.pipeline * layout.virtual_pipeline <= 61 for layout in found)
    assert all(layout.pipeline > 1 and layout.layers_in_first_stage is None for layout in found)
    assert len(set(candidates(POOL))) == len(list(candidates(POOL)))


def test_virtual_stages_save_a_part_of_the_bubble_and_keep_more_activations() -> None:
    plain = Layout(64, pipeline=4, tensor=2)
    model = replace(QWEN3, layers=32)
    pool = replace(POOL, model=model, world=64)
    for chunks in (2, 4, 8):
        virtual = replace(plain, virtual_pipeline=chunks)
        before, after = pool.cost(plain), pool.cost(virtual)
        assert after.bubble == pytest.approx(before.bubble / chunks * (after.busy / before.busy))
        assert after.compute == pytest.approx(before.compute) and after.stages > before.stages == 0
        kept = [
            stage_memory(model, layout, pool.workload(layout))[0].activations for layout in (plain, virtual)
        ]
        # Of 4 micro-batches in flight: 2 x 3 + 4 x (chunks - 1) + 1 chunks, each of a share of the layers.
        assert kept[1] / kept[0] == pytest.approx((7 + 4 * (chunks - 1)) / chunks / 4)


def test_packed_micro_batches_come_in_rounds_of_one_for_each_stage() -> None:
    layout = Layout(4, pipeline=4, virtual_pipeline=2)
    seven, eight = (
        call_cost(QWEN3, layout, Rows(count, tokens, 4096), H100, 8, passes=3, gradients=True)
        for count, tokens in ((7.0, 8192.0), (8.0, 7168.0))
    )
    assert seven == eight


def test_the_order_of_choices_depends_on_nothing_but_the_pool() -> None:
    pool = replace(POOL, world=64, model=QWEN3)
    first, second = ([str(choice.layout) for choice in choices([pool])] for _ in range(2))
    assert first == second and len(first) == len(set(first)) > 20


def test_a_stage_of_unequal_chunks_waits_for_the_largest() -> None:
    even, odd = Layout(2, pipeline=2, virtual_pipeline=2), Layout(4, pipeline=4, virtual_pipeline=2)
    model = replace(QWEN3, layers=36)
    rows = Rows(8, 8192, 4096)
    costs = [call_cost(model, layout, rows, H100, 8, passes=3) for layout in (even, odd)]
    # 36 layers: four chunks of 9, or eight of 4 and 5, of which each round of four has one of 5.
    assert costs[1].compute / costs[0].compute == pytest.approx(10 / 18)
