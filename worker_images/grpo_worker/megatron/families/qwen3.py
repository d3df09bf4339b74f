"""Qwen3, dense and mixture of experts: Megatron-Core's fields from ``config.json``, tensors and names."""

from typing import Any

from grpo_worker.megatron.families.base import COMMON_NAMES, Family, Shapes, gated


def _attention(hf: dict[str, Any]) -> dict[str, Any]:
    scaling = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    rope = scaling.get("rope_type", scaling.get("type", "default"))
    if rope != "default":
        raise ValueError(f"rope_scaling type {rope!r} of Qwen3 is not supported: use the model without it")
    if hf.get("use_sliding_window"):
        raise ValueError("use_sliding_window=true of Qwen3 is not supported")
    if hf.get("attention_bias"):
        raise ValueError("attention_bias=true of Qwen3 is not supported")
    return {
        "num_query_groups": hf["num_key_value_heads"],
        "kv_channels": _head_dim(hf),
    }


def _head_dim(hf: dict[str, Any]) -> int:
    return int(hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"])


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
    hidden, head = hf["hidden_size"], _head_dim(hf)
    queries, keys = hf["num_attention_heads"] * head, hf["num_key_value_heads"] * head
    return {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "self_attn.q_norm.weight": (head,),
        "self_attn.k_norm.weight": (head,),
    }


def _dense_shapes(hf: dict[str, Any], _layer: int) -> Shapes:
    return _attention_shapes(hf) | gated("mlp.", hf["hidden_size"], hf["intermediate_size"])


def _moe_shapes(hf: dict[str, Any], layer: int) -> Shapes:
    if not _is_moe(hf, layer):
        return _dense_shapes(hf, layer)
    shapes = _attention_shapes(hf) | {"mlp.gate.weight": (hf["num_experts"], hf["hidden_size"])}
    for expert in range(hf["num_experts"]):
        shapes |= gated(f"mlp.experts.{expert}.", hf["hidden_size"], hf["moe_intermediate_size"])
    return shapes


_NAMES = COMMON_NAMES | {
    "self_attention.linear_qkv.weight": (
        "self_attn.q_proj.weight",
        "self_attn.k_proj.weight",
        "self_attn.v_proj.weight",
    ),
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight",),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight",),
}
QWEN3 = Family("qwen3", _attention, _dense_shapes, _NAMES)
QWEN3_MOE = Family("qwen3_moe", _moe_fields, _moe_shapes, _NAMES)
