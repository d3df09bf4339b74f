"""Qwen3, dense and mixture of experts: Megatron-Core's fields from ``config.json``, tensors and names."""

from typing import Any

from grpo_worker.megatron.families.base import COMMON_NAMES, Family, Shapes, gated
from grpo_worker.megatron.families.grouped_attention import (
    GROUPED_NAMES,
    grouped_fields,
    grouped_shapes,
    refuse,
    refuse_scaling,
)


def _attention(hf: dict[str, Any]) -> dict[str, Any]:
    refuse_scaling(hf)
    refuse(hf, "use_sliding_window", False)
    refuse(hf, "attention_bias", False)
    return grouped_fields(hf, norms=True, biases=False)


def _moe_fields(hf: dict[str, Any]) -> dict[str, Any]:
    return _attention(hf) | {
        "num_moe_experts": hf["num_experts"],
        "moe_ffn_hidden_size": hf["moe_intermediate_size"],
        "moe_layer_freq": [int(_is_moe(hf, layer)) for layer in range(hf["num_hidden_layers"])],
        "moe_router_topk": hf["num_experts_per_tok"],
        "moe_router_score_function": "softmax",
        # Softmax over the chosen experts equals softmax over all, restricted to them and normalised.
        "moe_router_pre_softmax": not hf.get("norm_topk_prob", False),
    }


def _is_moe(hf: dict[str, Any], layer: int) -> bool:
    if layer in hf.get("mlp_only_layers", ()):
        return False
    return (layer + 1) % int(hf.get("decoder_sparse_step", 1)) == 0


def _attention_shapes(hf: dict[str, Any]) -> Shapes:
    return grouped_shapes(hf, norms=True, biases=False)


def _dense_shapes(hf: dict[str, Any], _layer: int) -> Shapes:
    return _attention_shapes(hf) | gated("mlp.", hf["hidden_size"], hf["intermediate_size"])


def _moe_shapes(hf: dict[str, Any], layer: int) -> Shapes:
    if not _is_moe(hf, layer):
        return _dense_shapes(hf, layer)
    shapes = _attention_shapes(hf) | {"mlp.gate.weight": (hf["num_experts"], hf["hidden_size"])}
    for expert in range(hf["num_experts"]):
        shapes |= gated(f"mlp.experts.{expert}.", hf["hidden_size"], hf["moe_intermediate_size"])
    return shapes


_NAMES = COMMON_NAMES | GROUPED_NAMES
QWEN3 = Family("qwen3", _attention, _dense_shapes, _NAMES)
QWEN3_MOE = Family("qwen3_moe", _moe_fields, _moe_shapes, _NAMES)
