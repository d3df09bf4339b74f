"""Bytes that layers of Transformer Engine keep: those of tensors seen on a GPU, and their relations."""

import json

import pytest

from grpo_devcluster.paths import REPO
from grpo_operator.api.catalog.architectures import architecture
from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.api.v1alpha1.recompute import NOTHING, RecomputeModule
from grpo_operator.plan.planner.model.shape import ModelShape
from grpo_operator.plan.planner.training.activations import Workload, layer_activations
from grpo_operator.plan.planner.training.fused_activations import (
    layer_bytes,
    recomputed_bytes,
    scratch_bytes,
)
from grpo_operator.plan.planner.training.memory import stage_memory
from support.recompute import recompute_of

V3 = ModelShape.from_hf(architecture("deepseek-v3"))
AIR = ModelShape.from_hf(architecture("glm-4.5-air") | {"n_routed_experts": 16})
QWEN = ModelShape.from_hf(architecture("qwen3-8b"))
MODULES = ("layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts")


# The megabytes are those of the tensors of one layer at the peak of an update on an H100.
def test_a_layer_of_latent_attention_keeps_the_tensors_that_were_seen() -> None:
    seen = {
        "q_down and q_up": 12.6 + 201.3, "keys": 201.3, "values": 134.2, "output": 136.3,
        "norms of queries and keys": 12.6 + 4.2, "keys before their norm": 4.2,
    }  # fmt: skip
    found = layer_bytes(V3, 60, fp8=False)
    assert 4096 * found.attention / 1e6 == pytest.approx(sum(seen.values()), rel=0.01)
    experts = {"inputs": 469.8, "gate and up": 268.4, "product": 134.2, "shared": 33.5 + 16.8}
    assert 4096 * found.feed_forward / 1e6 == pytest.approx(sum(experts.values()), rel=0.03)
    assert 4096 * found.norms / 1e6 == pytest.approx(4 * 58.7, rel=0.01)
    assert 4096 * found.passing / 1e6 == pytest.approx(3 * 469.8, rel=0.01)


def test_a_layer_in_fp8_keeps_the_inputs_of_products_in_fp8() -> None:
    attention = {"queries": 201.3, "keys": 16.8, "values": 16.8, "output": 204.5}
    experts = {"inputs": 277.5, "gate and up": 369.8, "product": 95.4, "shared": 46.1 + 11.9}
    found = layer_bytes(AIR, 40, fp8=True)
    assert 8192 * found.attention / 1e6 == pytest.approx(sum(attention.values()), rel=0.01)
    assert 8192 * found.feed_forward / 1e6 == pytest.approx(sum(experts.values()), rel=0.01)
    assert 8192 * found.passing / 1e6 == pytest.approx(5 * 537.9 + 184.9, rel=0.01)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize(("model", "layer"), [(V3, 0), (V3, 60), (AIR, 40), (QWEN, 3)])
def test_recomputation_drops_less_than_is_kept(model: ModelShape, layer: int, module: str, fp8: bool) -> None:
    whole = layer_bytes(model, layer, fp8)
    attention, feed_forward = recomputed_bytes(model, layer, (RecomputeModule(module),), fp8)
    assert 0 <= attention <= whole.norms + whole.attention
    assert 0 <= feed_forward <= whole.norms + whole.feed_forward


def test_scratch_has_one_tensor_for_each_shape_of_a_weight() -> None:
    # Those of proj, q_up, kv_up, q_down and kv_down; the shared expert has the shapes of the others.
    attention, experts, spaces = 374.2, 88.1, 33.6 + 134.2
    assert scratch_bytes(V3, Layout(1), False, True) / 1e6 == pytest.approx(
        attention + experts + spaces, rel=0.01
    )
    dense = 2 * 3 * V3.ffn * V3.hidden  # gate, up and down
    both, fewer = (scratch_bytes(V3, Layout(1), True, experts) for experts in (True, False))
    assert both - scratch_bytes(V3, Layout(1), False, True) == dense
    assert both - fewer == pytest.approx((experts + 134.2) * 1e6, rel=0.01)
    assert scratch_bytes(V3, Layout(8, tensor=8), True, True) < both / 2


def test_queries_and_keys_are_kept_twice_only_where_they_are_normalised() -> None:
    rotated = 2 * QWEN.attention.head * (QWEN.heads + QWEN.attention.kv_heads)  # type: ignore[union-attr]
    llama = ModelShape.from_hf(architecture("llama-3.1-8b"))
    assert layer_bytes(QWEN, 0, False).attention - layer_bytes(llama, 0, False).attention == rotated


def test_the_end_of_a_layer_counts_once_and_full_recomputation_ends_a_layer_too() -> None:
    kept = layer_activations(V3, Layout(1), Workload(1024, recompute=NOTHING, fused=True), 60)
    full = layer_activations(V3, Layout(1), Workload(1024, recompute=recompute_of("full"), fused=True), 60)
    whole = layer_bytes(V3, 60, fp8=False)
    assert (kept.kept, kept.working) == (1024 * whole.kept, 1024 * whole.passing)
    assert full.working == 1024 * (whole.kept + whole.passing)


def test_the_plan_of_rows_over_two_ranks_is_the_recorded_share_of_the_peak() -> None:
    record = json.loads((REPO / "benchmarks/results/context_gpu.json").read_text())
    case = record["cases"]["long transformer_engine"]
    # The model of benchmarks/gpu/context_speed.py.
    hf = architecture("deepseek-v3") | {
        "num_hidden_layers": 2, "first_k_dense_replace": 0, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "n_group": 1, "topk_group": 1, "vocab_size": 4096, "num_nextn_predict_layers": 0,
    }  # fmt: skip
    workload = Workload(case["tokens"], 1, 2, fused=True)
    (stage,) = stage_memory(ModelShape.from_hf(hf), Layout(world=2, context=2), workload)
    assert stage.total / (case["peak_gb"] * 1e9) == pytest.approx(case["planned_ratio"], rel=1e-6)
