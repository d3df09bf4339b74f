"""Grouped-query attention: Megatron-Core's fields from ``config.json``, tensors and names."""

from typing import Any

from grpo_worker.megatron.families.base import Shapes

_PARTS = ("q_proj", "k_proj", "v_proj")
# Megatron-Core's names -> Hugging Face's; a family that lacks norms or biases has no tensors of their names.
GROUPED_NAMES: dict[str, tuple[str, ...]] = {
    "self_attention.linear_qkv.weight": tuple(f"self_attn.{part}.weight" for part in _PARTS),
    "self_attention.linear_qkv.bias": tuple(f"self_attn.{part}.bias" for part in _PARTS),
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight",),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight",),
}


def grouped_fields(hf: dict[str, Any], *, norms: bool, biases: bool) -> dict[str, Any]:
    """Return the fields of grouped attention.

    ``norms``: each query and key head is normalised. ``biases``: queries, keys and values have one.
    Raises ValueError for another activation function than SwiGLU's.
    """
    refuse(hf, "hidden_act", "silu")
    return {
        "num_query_groups": hf["num_key_value_heads"],
        "kv_channels": head_dim(hf),
        "qk_layernorm": norms,
        "add_qkv_bias": biases,
    }


def grouped_shapes(hf: dict[str, Any], *, norms: bool, biases: bool) -> Shapes:
    """Return the tensors of an attention block and of the norms before it and after it."""
    hidden, head = hf["hidden_size"], head_dim(hf)
    queries, keys = hf["num_attention_heads"] * head, hf["num_key_value_heads"] * head
    shapes: Shapes = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.o_proj.weight": (hidden, queries),
    }
    for part, rows in zip(_PARTS, (queries, keys, keys), strict=True):
        shapes[f"self_attn.{part}.weight"] = (rows, hidden)
        if biases:
            shapes[f"self_attn.{part}.bias"] = (rows,)
    if norms:
        shapes |= {"self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)}
    return shapes


def head_dim(hf: dict[str, Any]) -> int:
    """Return the width of an attention head."""
    return int(hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"])


def rope_scaling(hf: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the kind of rotary scaling, "default" for none, and its parameters."""
    scaling = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    return scaling.get("rope_type", scaling.get("type", "default")), scaling


def refuse_scaling(hf: dict[str, Any]) -> None:
    """Raise ValueError when the rotary frequencies are scaled."""
    kind, _ = rope_scaling(hf)
    if kind != "default":
        raise ValueError(
            f"config.json: rope_scaling type {kind!r} of a {hf['model_type']} model is not supported: use "
            "the model without it"
        )


def refuse(hf: dict[str, Any], field: str, *supported: Any) -> None:
    """Raise ValueError when a field, if given, has none of the supported values."""
    if field in hf and hf[field] not in supported:
        raise ValueError(
            f"config.json: {field}={hf[field]!r} of a {hf['model_type']} model is not supported: use a model "
            f"with {field}={supported[0]!r}"
        )
