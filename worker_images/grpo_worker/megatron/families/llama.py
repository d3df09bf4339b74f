"""Llama 3: Megatron-Core's fields from ``config.json``, tensors and names."""

from typing import Any

from grpo_worker.megatron.families.base import COMMON_NAMES, Family, Shapes, gated
from grpo_worker.megatron.families.grouped_attention import (
    GROUPED_NAMES,
    grouped_fields,
    grouped_shapes,
    refuse,
    rope_scaling,
)

# Megatron-Core 0.16.1 takes only the factor of Llama 3's scaling; these are constants of its code.
_CONSTANTS = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}


def _fields(hf: dict[str, Any]) -> dict[str, Any]:
    # Such a model has a bias in the output projection of its attention too, which Megatron-Core adds only
    # together with biases in the MLP.
    refuse(hf, "attention_bias", False)
    refuse(hf, "mlp_bias", False)
    return grouped_fields(hf, norms=False, biases=False)


def _rotary(hf: dict[str, Any]) -> dict[str, Any]:
    kind, scaling = rope_scaling(hf)
    if kind == "default":
        return {}
    if kind != "llama3":
        raise ValueError(
            f"config.json: rope_scaling type {kind!r} of a llama model is not supported: use the type "
            "llama3, or the model without it"
        )
    for field, constant in _CONSTANTS.items():
        if scaling[field] != constant:
            raise ValueError(
                f"config.json: rope_scaling.{field}={scaling[field]} of a llama model cannot be expressed in "
                f"Megatron-Core: use a model with {constant}"
            )
    return {"rope_scaling": True, "rope_scaling_factor": scaling["factor"]}


def _layer_shapes(hf: dict[str, Any], _layer: int) -> Shapes:
    attention = grouped_shapes(hf, norms=False, biases=False)
    return attention | gated("mlp.", hf["hidden_size"], hf["intermediate_size"])


LLAMA = Family("llama", _fields, _layer_shapes, COMMON_NAMES | GROUPED_NAMES, rotary=_rotary)
