"""Qwen2 and Qwen2.5: Megatron-Core's fields from ``config.json``, tensors and names."""

from typing import Any

from grpo_worker.megatron.families.base import COMMON_NAMES, Family, Shapes, gated
from grpo_worker.megatron.families.grouped_attention import (
    GROUPED_NAMES,
    grouped_fields,
    grouped_shapes,
    refuse,
    refuse_scaling,
)


def _fields(hf: dict[str, Any]) -> dict[str, Any]:
    refuse(hf, "use_sliding_window", False)
    refuse_scaling(hf)
    return grouped_fields(hf, norms=False, biases=True)


def _layer_shapes(hf: dict[str, Any], _layer: int) -> Shapes:
    attention = grouped_shapes(hf, norms=False, biases=True)
    return attention | gated("mlp.", hf["hidden_size"], hf["intermediate_size"])


QWEN2 = Family("qwen2", _fields, _layer_shapes, COMMON_NAMES | GROUPED_NAMES)
