"""GLM-4.5 to GLM-4.7: Megatron-Core's fields from ``config.json``, tensors and names.

Attention is grouped, with rotary embeddings on a part of each head; the experts are DeepSeek-V3's.
"""

from typing import Any

from grpo_worker.megatron.families.base import COMMON_NAMES, Family, Shapes
from grpo_worker.megatron.families.grouped_attention import (
    GROUPED_NAMES,
    grouped_fields,
    grouped_shapes,
    refuse_scaling,
)
from grpo_worker.megatron.families.sigmoid_experts import EXPERT_NAMES, expert_fields, expert_shapes


def _options(hf: dict[str, Any]) -> dict[str, bool]:
    return {"norms": bool(hf.get("use_qk_norm")), "biases": bool(hf.get("attention_bias"))}


def _fields(hf: dict[str, Any]) -> dict[str, Any]:
    refuse_scaling(hf)
    return grouped_fields(hf, **_options(hf)) | expert_fields(hf)


def _rotary(hf: dict[str, Any]) -> dict[str, Any]:
    return {"rotary_percent": float(hf["partial_rotary_factor"])}


def _layer_shapes(hf: dict[str, Any], layer: int) -> Shapes:
    return grouped_shapes(hf, **_options(hf)) | expert_shapes(hf, layer)


GLM4_MOE = Family(
    "glm4_moe", _fields, _layer_shapes, COMMON_NAMES | GROUPED_NAMES | EXPERT_NAMES, rotary=_rotary
)
