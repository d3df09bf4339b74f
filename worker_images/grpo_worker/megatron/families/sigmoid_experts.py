"""Experts as DeepSeek-V3 has them: routers with sigmoid scores and a bias, and shared experts."""

from typing import Any

from grpo_worker.megatron.families.base import Shapes, gated

# Megatron-Core's names -> Hugging Face's.
EXPERT_NAMES: dict[str, tuple[str, ...]] = {
    "mlp.router.expert_bias": ("mlp.gate.e_score_correction_bias",),
    "mlp.shared_experts.linear_fc1.weight": (
        "mlp.shared_experts.gate_proj.weight",
        "mlp.shared_experts.up_proj.weight",
    ),
    "mlp.shared_experts.linear_fc2.weight": ("mlp.shared_experts.down_proj.weight",),
}


def expert_fields(hf: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the experts.

    Raises ValueError for a router that Megatron-Core cannot express.
    """
    _refuse_inexpressible(hf)
    dense = hf["first_k_dense_replace"]
    return {
        "num_moe_experts": hf["n_routed_experts"],
        "moe_ffn_hidden_size": hf["moe_intermediate_size"],
        "moe_shared_expert_intermediate_size": hf["moe_intermediate_size"] * hf["n_shared_experts"],
        "moe_layer_freq": [0] * dense + [1] * (hf["num_hidden_layers"] - dense),
        "moe_router_topk": hf["num_experts_per_tok"],
        "moe_router_num_groups": hf["n_group"],
        "moe_router_group_topk": hf["topk_group"],
        "moe_router_score_function": "sigmoid",
        "moe_router_topk_scaling_factor": hf["routed_scaling_factor"],
        "moe_router_enable_expert_bias": True,
    }


def _refuse_inexpressible(hf: dict[str, Any]) -> None:
    kind, groups, limit, topk = hf["model_type"], hf["n_group"], hf["topk_group"], hf["num_experts_per_tok"]
    # transformers and SGLang score a group by its best 2 experts, Megatron-Core by its best
    # topk // topk_group.
    if groups > 1 and topk // limit != 2:
        raise ValueError(
            f"config.json: num_experts_per_tok ({topk}) must be 2 x topk_group ({limit}), or Megatron-Core "
            "would score the expert groups differently: use another model"
        )
    if not hf.get("norm_topk_prob", True):
        raise ValueError(
            f"config.json: norm_topk_prob=false of a {kind} model cannot be expressed in Megatron-Core: use "
            "a model with norm_topk_prob=true"
        )
    if topk == 1:
        raise ValueError(
            "config.json: num_experts_per_tok=1: Megatron-Core would not normalise the weight of a single "
            "expert: use a model with more experts per token"
        )
    if hf.get("scoring_func", "sigmoid") != "sigmoid":
        raise ValueError(
            f"config.json: scoring_func={hf['scoring_func']!r}: the routers of a {kind} model score experts "
            "by sigmoid: use a model with scoring_func='sigmoid'"
        )


def expert_shapes(hf: dict[str, Any], layer: int) -> Shapes:
    """Return the tensors of a layer's dense MLP, or of its router, shared and routed experts."""
    hidden, experts = hf["hidden_size"], hf["n_routed_experts"]
    if layer < hf["first_k_dense_replace"]:
        return gated("mlp.", hidden, hf["intermediate_size"])
    width = hf["moe_intermediate_size"]
    shapes = gated("mlp.shared_experts.", hidden, width * hf["n_shared_experts"])
    shapes["mlp.gate.weight"] = (experts, hidden)
    shapes["mlp.gate.e_score_correction_bias"] = (experts,)
    for expert in range(experts):
        shapes |= gated(f"mlp.experts.{expert}.", hidden, width)
    return shapes
