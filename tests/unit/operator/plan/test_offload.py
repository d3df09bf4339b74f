"""Activations in host memory: their bytes, their time, and jobs that leave it to the planner."""

import copy
import re
from typing import Any

import pytest
import yaml

from grpo_devcluster.paths import REPO
from grpo_operator.api.catalog.architectures import architecture
from grpo_operator.api.catalog.gpus import GPUS, GpuType
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.api.v1alpha1.offload import OffloadModule, OffloadSpec
from grpo_operator.api.v1alpha1.recompute import NOTHING
from grpo_operator.cli.report import as_data, as_table
from grpo_operator.plan.planner.model.shape import ModelShape
from grpo_operator.plan.planner.resolve import JobPlan, RefusedError, resolve
from grpo_operator.plan.planner.settled import with_layout
from grpo_operator.plan.planner.step.job import step_model
from grpo_operator.plan.planner.training.activations import Workload, layer_activations
from grpo_operator.plan.planner.training.cost import LayoutCost, Rows, call_cost
from grpo_operator.plan.planner.training.memory import stage_memory
from grpo_operator.plan.planner.training.offloaded import UNDERWAY, offloaded
from grpo_operator.plan.status.grpojob import layout_status
from support.objects import pool_of

V3, QWEN3 = (ModelShape.from_hf(architecture(name)) for name in ("deepseek-v3", "qwen3-8b"))
ONE, TOKENS = Layout(1), 8192
STATE = {"parameters": True, "gradients": True, "optimizer": True}
EXPERTS = (OffloadModule.EXPERT_FC1, OffloadModule.MOE_ACT)


def _of(model: ModelShape, text: str, layer: int = 3, tokens: int = TOKENS) -> tuple[float, float]:
    """Return values per token that leave the GPU, and that are copied."""
    found = offloaded(model, tuple(OffloadModule(name) for name in text.split(",")), layer, tokens, 1)
    return found.leaving / 2 / tokens, found.copied / 2 / tokens


def test_each_module_offloads_what_it_saves() -> None:
    heads = 128
    attention = heads * (2 * (128 + 64) + 128)
    assert _of(V3, "attn_norm") == _of(V3, "mlp_norm") == (7168, 7168)
    assert _of(V3, "core_attn") == (attention, attention + heads * 128), "the projection keeps the output"
    assert _of(V3, "core_attn,attn_proj") == (attention + heads * 128, attention + 2 * heads * 128)
    assert _of(V3, "qkv_linear") == (7168 + 2 * (1536 + 512), 2 * 7168 + 2 * (1536 + 512))
    assert _of(V3, "expert_fc1") == (8 * 7168, 8 * 7168) and _of(V3, "moe_act") == (2 * 8 * 2048,) * 2
    assert _of(V3, "expert_fc1,moe_act", layer=0) == (0, 0), "a dense layer"
    assert _of(QWEN3, "qkv_linear") == (4096, 4096)
    assert _of(QWEN3, "core_attn") == (6 * 1024, 6 * 1024 + 4096)


def test_small_tensors_stay() -> None:
    assert _of(V3, "qkv_linear", tokens=2048) == (7168 + 2 * (1536 + 512), 2 * 7168 + 2 * (1536 + 512))
    assert _of(V3, "qkv_linear", tokens=1024) == (7168 + 2 * 1536, 2 * 7168 + 2 * 1536)
    assert _of(V3, "attn_norm", tokens=128) == (0, 0)


def test_a_layer_keeps_less_and_needs_room_for_what_is_underway() -> None:
    plain, moved = (
        layer_activations(V3, ONE, Workload(TOKENS, recompute=NOTHING, offloaded=modules), 3)
        for modules in ((), EXPERTS)
    )
    leaving = 2 * TOKENS * 8 * (7168 + 2 * 2048)
    assert plain.kept - moved.kept == leaving == moved.copied and plain.copied == 0
    assert moved.working - plain.working == UNDERWAY * leaving


def test_host_memory_holds_the_activations_of_all_micro_batches_in_flight() -> None:
    layout = Layout(256, 2, 16, 1, 16, layers_in_first_stage=3, layers_in_last_stage=2)
    work = Workload(TOKENS, 1, 64, NOTHING, offloaded=EXPERTS)
    plain, stages = (stage_memory(V3, layout, each) for each in (Workload(TOKENS, 1, 64, NOTHING), work))
    of_layer = layer_activations(V3, layout, work, 3).copied
    each = [0, *[4] * 14, 2]  # layers with experts: the first three of all are dense
    assert [stage.copied for stage in stages] == [each[s] * of_layer * (16 - s) for s in range(16)]
    for before, after in zip(plain, stages, strict=True):
        assert before.activations - after.activations == after.copied == after.host - before.host


def _cost(tokens: int, modules: tuple[OffloadModule, ...], count: int = 8) -> LayoutCost:
    return call_cost(
        V3, Layout(1), Rows(count, tokens, tokens / 2), GPUS[GpuType.H100], 8,
        passes=3, gradients=True, offloaded=modules,
    )  # fmt: skip


def test_copies_take_time_only_where_they_outlast_computation() -> None:
    none, experts, everything = (_cost(TOKENS, modules) for modules in ((), EXPERTS, tuple(OffloadModule)))
    assert none.offload == 0 and experts.compute == none.compute
    forward = none.busy / 3
    copies = offloaded(V3, tuple(OffloadModule), 3, TOKENS, 1).copied * 61 * 8 / 25e9
    assert everything.offload == pytest.approx(max(copies - forward, 0) + max(copies - 2 * forward, 0))
    assert everything.offload >= experts.offload
    assert _cost(TOKENS, EXPERTS, 16).offload == pytest.approx(2 * experts.offload)


def test_passes_without_gradients_copy_nothing() -> None:
    rows = Rows(8, TOKENS, TOKENS / 2)
    plain, moved = (
        call_cost(V3, ONE, rows, GPUS[GpuType.H100], 8, passes=1, offloaded=modules)
        for modules in ((), tuple(OffloadModule))
    )
    assert plain == moved


def _spec(manifest: str = "qwen3-30b-a3b-16xh100", **trainer: Any) -> GRPOJobSpec:
    body = copy.deepcopy(yaml.safe_load((REPO / "manifests" / f"{manifest}.yaml").read_text())["spec"])
    body["mode"], body["weightSync"] = "static", {}
    body["data"] |= {"promptLength": 512, "responseLength": 512}
    body["trainer"] |= {"parallelism": {"expert": 8}, "recompute": "none"} | trainer
    return GRPOJobSpec.model_validate(body)


def _resolve(spec: GRPOJobSpec) -> JobPlan:
    return resolve(spec, pool_of(spec))


def test_auto_offloads_activations_where_nothing_fits_without() -> None:
    with pytest.raises(RefusedError, match=r"needs .* in total"):
        _resolve(_spec(offload=STATE))
    plan = _resolve(spec := _spec(offload=STATE | {"auto": True}))
    assert plan.offload == OffloadSpec(**STATE, activations=list(OffloadModule))
    assert plan.reason == "given; offload.activations: does not fit without"
    assert plan.training is not None and plan.host is not None
    assert max(stage.total for stage in plan.stages) <= plan.training.safe
    settled = with_layout(spec, layout_status(plan))
    assert settled.trainer.offload == plan.offload, "the ranks get it"
    assert "activations of attn_norm, qkv_linear" in as_table(as_data(spec, pool_of(spec), plan, 5e9))


def test_auto_offloads_nothing_where_all_fits() -> None:
    few: dict[str, Any] = {"maxTokensPerGpu": 4096, "recompute": "selective"}
    spec = _spec(offload=STATE | {"auto": True}, **few)
    assert _resolve(spec).offload == OffloadSpec(**STATE) and "offload" not in _resolve(spec).reason


def test_auto_leaves_out_what_is_recomputed() -> None:
    plan = _resolve(_spec(offload=STATE | {"auto": True}, recompute="selective", maxTokensPerGpu=12288))
    assert str(plan.recompute) == "selective: layernorm, moe_act"
    assert plan.offload.activations == [m for m in OffloadModule if m != OffloadModule.QKV_LINEAR]


def test_auto_moves_the_optimizer_where_layers_keep_next_to_nothing() -> None:
    more: dict[str, Any] = {"recompute": "full", "parallelism": {}, "nodes": 1}
    spec = _spec("qwen3-8b-8gpu", **more, maxTokensPerGpu=20480, offload={"parameters": True})
    assert _outcome(spec) is None
    auto = spec.trainer.offload.model_copy(update={"auto": True})
    plan = _outcome(spec.model_copy(update={"trainer": spec.trainer.model_copy(update={"offload": auto})}))
    assert plan is not None and plan.training is not None
    assert plan.offload == OffloadSpec(parameters=True, optimizer=True), plan.reason
    assert plan.reason == "given; offload.optimizer: does not fit without"
    assert plan.training.cost(plan.layout).offload > 0, "its copies take time"


def _outcome(spec: GRPOJobSpec) -> JobPlan | None:
    try:
        return _resolve(spec)
    except RefusedError:
        return None


def test_a_pod_has_memory_for_offloaded_activations() -> None:
    few: dict[str, Any] = {"maxTokensPerGpu": 4096, "recompute": "selective"}
    plain, moved = (
        _resolve(_spec(offload=STATE | more, **few)) for more in ({}, {"activations": ["moe_act"]})
    )
    assert plain.host is not None and moved.host is not None
    copied = 8 * max(stage.copied for stage in moved.stages)
    assert moved.host.moved - plain.host.moved == copied > 0
    assert moved.host.trainer - plain.host.trainer == 2 * copied, "pinned memory is rounded up"
    spec = _spec(offload=STATE | {"activations": ["moe_act"]}, **few)
    assert (model := step_model(spec, pool_of(spec), moved)) and model.workload.offloaded == ("moe_act",)


@pytest.mark.parametrize(
    ("trainer", "text"),
    [
        (
            {"recompute": "selective", "offload": {"activations": ["qkv_linear"]}},
            "spec.trainer.offload.activations=[qkv_linear]: recompute=selective: layernorm, moe_act drops or "
            "needs them: set spec.trainer.recomputeModules without layernorm, or remove",
        ),
        (
            {"manifest": "qwen3-8b-8gpu", "offload": {"activations": ["moe_act"]}, "parallelism": {}},
            "spec.trainer.offload.activations=[moe_act]: a qwen3 model has no experts: remove moe_act",
        ),
    ],
)
def test_modules_that_cannot_be_offloaded_are_refused(trainer: dict[str, Any], text: str) -> None:
    with pytest.raises(RefusedError, match=re.escape(text)):
        _resolve(_spec(**trainer))


def test_auto_needs_a_known_model() -> None:
    spec = _spec(offload={"auto": True})
    unknown = spec.model_copy(update={"model": spec.model.model_copy(update={"architecture": None})})
    with pytest.raises(RefusedError, match=r"offload\.auto=true: the operator cannot read the model: set"):
        _resolve(unknown)
