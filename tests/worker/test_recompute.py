"""Recomputation of activations: it changes no gradient, and keeps as few bytes as the planner says."""

from functools import cache

import pytest
import torch

from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.api.v1alpha1.recompute import Recompute, RecomputeKind, RecomputeModule
from grpo_operator.plan.planner.model.shape import GqaShape, ModelShape
from grpo_operator.plan.planner.training.activations import Workload, layer_activations
from support.ranks.compare import largest_gap
from support.ranks.launcher import run as run_on_ranks
from support.recompute import recompute_of
from support.tiny_models import tiny_model

LAYOUTS: dict[str, tuple[int, dict[str, int], bool]] = {
    "one": (1, {}, False),
    "tp2-ep2": (2, {"tensor": 2, "expert": 2}, False),
    "tp2-pp2-ep2-packed": (4, {"tensor": 2, "pipeline": 2, "expert": 2}, True),
}
MODULES = {
    "deepseek_v3": [
        "mla_up_proj",
        "mlp",
        "moe",
        "shared_experts",
        "core_attn",
        "mla_up_proj,mlp,moe,core_attn",
    ],
    "qwen3_moe": ["moe", "core_attn", "moe,core_attn"],
}  # fmt: skip
NORMS = {
    "deepseek_v3": ["layernorm", "layernorm,mla_up_proj,mlp,moe,core_attn"],
    "qwen3_moe": ["layernorm,moe"],
}


@cache
def _gradients(model: str, layout: str, recompute: str) -> dict[str, torch.Tensor]:
    world, sizes, packed = LAYOUTS[layout]
    found: dict[str, torch.Tensor] = run_on_ranks(
        "recompute_cases:gradients", world, model=model, layout=sizes, recompute=recompute, packed=packed
    )[0]
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODULES)
def test_recomputing_modules_or_some_layers_changes_no_bit_of_a_gradient(model: str, layout: str) -> None:
    kept = _gradients(model, layout, "none")
    for recompute in ["full", "full:1", *(f"selective:{modules}" for modules in MODULES[model])]:
        found = _gradients(model, layout, recompute)
        assert [name for name in kept if not torch.equal(found[name], kept[name])] == [], recompute


STAGES = {"one": (1, {}), "pp2": (2, {"pipeline": 2}), "pp2-vp2": (2, {"pipeline": 2, "virtual_pipeline": 2})}
# Numbers of the layers that begin a model chunk.
FIRST = {"one": {1}, "pp2": {1, 3}, "pp2-vp2": {1, 2, 3, 4}}


@pytest.mark.parametrize("layout", STAGES)
def test_the_first_layers_of_each_stage_compute_twice_and_no_others(layout: str) -> None:
    once, twice, first = (_passes(layout, text) for text in ("none", "full", "full:1"))
    assert {name.split()[0] for name in once} == {"1", "2", "3", "4"}
    assert twice == {name: 2 * count for name, count in once.items()}
    for name, count in once.items():
        assert first[name] == count * (1 + (int(name.split()[0]) in FIRST[layout])), name


@pytest.mark.parametrize(
    ("modules", "parts"), [("mlp", ["1 mlp"]), ("mla_up_proj", ["1 up", "2 up", "3 up", "4 up"])]
)
def test_only_the_named_modules_compute_twice(modules: str, parts: list[str]) -> None:
    once, found = _passes("pp2", "none"), _passes("pp2", f"selective:{modules}")
    assert [name for name in sorted(once) if found[name] == 2 * once[name]] == parts
    assert all(found[name] == once[name] for name in once if name not in parts)


def _passes(layout: str, recompute: str) -> dict[str, int]:
    world, sizes = STAGES[layout]
    ranks = run_on_ranks("recompute_cases:passes", world, layout=sizes, recompute=recompute)
    return {name: count for rank in ranks for name, count in rank.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", NORMS)
def test_recomputing_norms_changes_rounding_only(model: str, layout: str) -> None:
    # PyTorch's RMS norm on a CPU is several operations: their gradients add up before the residual's joins.
    for modules in NORMS[model]:
        found = _gradients(model, layout, f"selective:{modules}")
        assert largest_gap(found, _gradients(model, layout, "none")) < (1e-6,)


def test_activations_of_experts_need_kernels_that_group_them() -> None:
    assert run_on_ranks("recompute_cases:refused", 1, recompute="selective:layernorm,mlp") == [""]
    (refusal,) = run_on_ranks("recompute_cases:refused", 1, recompute="selective:layernorm,moe_act")
    assert refusal.startswith("spec.trainer.recomputeModules: moe_act needs") and "without moe_act" in refusal


def test_the_layer_of_multi_token_prediction_is_recomputed_with_all_others_only() -> None:
    once, kept = _with_mtp("none")
    assert any("eh_proj" in name and tensor.abs().max() > 0 for name, tensor in kept.items())
    for recompute, times in (("full", 2), ("full:1", 1)):
        passes, found = _with_mtp(recompute)
        assert passes == times * once, recompute
        assert [name for name in kept if not torch.equal(found[name], kept[name])] == [], recompute


def _with_mtp(recompute: str) -> tuple[int, dict[str, torch.Tensor]]:
    ranks = run_on_ranks("recompute_cases:with_mtp", 2, layout=LAYOUTS["tp2-ep2"][1], recompute=recompute)
    return ranks[0][0], ranks[0][1]


TOKENS, FP32 = 1024, 4
KEPT = {
    "deepseek_v3": [
        "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts", "core_attn", "layernorm,mla_up_proj,mlp",
        "layernorm,mla_up_proj,mlp,moe,core_attn",
    ],
    "qwen3_moe": ["layernorm", "moe", "core_attn", "layernorm,moe"],
    "qwen3": ["layernorm", "mlp", "core_attn", "layernorm,mlp"],
}  # fmt: skip


@pytest.mark.parametrize("model", KEPT)
def test_a_forward_pass_keeps_as_few_bytes_as_planned(model: str) -> None:
    shape = ModelShape.from_hf(tiny_model(model) | {"mlp_only_layers": []})
    kept = {}
    for text in ["none", "full", "full:2", *(f"selective:{modules}" for modules in KEPT[model])]:
        (measured,) = run_on_ranks(
            "recompute_cases:kept_bytes", 1, model=model, recompute=text, tokens=TOKENS
        )
        planned = _planned(shape, recompute_of(text))
        kept[text] = measured - TOKENS * _of_megatron_only(shape, recompute_of(text))
        assert planned == pytest.approx(kept[text], rel=0.1), text
    assert kept["full"] < min(kept[text] for text in kept if text != "full")
    without_scores = [text for text in kept if text not in ("none", "selective:core_attn")]
    assert all(kept[text] < 0.98 * kept["none"] for text in without_scores), kept


def _planned(shape: ModelShape, recompute: Recompute) -> float:
    """Return the planned bytes in fp32, of which the formula counts two bytes a value."""
    workload = Workload(TOKENS, recompute=recompute)
    each = (layer_activations(shape, Layout(1), workload, n, n).kept for n in range(shape.layers))
    return sum(each) * FP32 / 2 - TOKENS * _of_the_formula_only(shape, recompute)


def _of_the_formula_only(shape: ModelShape, recompute: Recompute) -> int:
    """Return bytes per token that the formula counts and Megatron-Core's layers do not keep on a CPU.

    The formula was corrected with measured peaks of whole steps, which these stand for.
    """
    attention, experts = shape.attention, shape.experts
    kept = _layers_kept(shape, recompute)
    if isinstance(attention, GqaShape):  # values, once more than in the output of the projection
        result = len(kept) * attention.kv_heads * attention.head
    elif RecomputeModule.MLA_UP_PROJ in recompute.modules:
        result = 0
    else:  # queries and keys before the rotary embedding, and the keys of the projection's output
        result = len(kept) * shape.heads * (2 * (attention.nope + attention.rope) + attention.nope)
    if experts is not None and RecomputeModule.MOE not in recompute.modules:  # outputs of the experts
        mixtures = [layer for layer in kept if layer >= experts.first_dense]
        result += len(mixtures) * experts.top_k * shape.hidden
    return FP32 * result


def _of_megatron_only(shape: ModelShape, recompute: Recompute) -> int:
    """Return bytes per token that the layers keep and the formula does not count.

    They are cosines and sines of queries and keys, which all heads share, and with grouped attention a copy
    of the queries out of the projection's output.
    """
    attention, kept = shape.attention, len(_layers_kept(shape, recompute))
    if isinstance(attention, GqaShape):
        return FP32 * kept * (4 * attention.head + shape.heads * attention.head)
    return FP32 * kept * 4 * attention.rope * (RecomputeModule.MLA_UP_PROJ not in recompute.modules)


def _layers_kept(shape: ModelShape, recompute: Recompute) -> list[int]:
    """Return the layers that are not recomputed as a whole."""
    return [n for n in range(shape.layers) if recompute.of_layer(n).kind is not RecomputeKind.FULL]
