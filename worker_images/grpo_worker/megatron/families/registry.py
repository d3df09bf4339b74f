"""Registry of the supported model families."""

from typing import Any

from grpo_worker.data.routed_experts import ExpertLayers
from grpo_worker.megatron.families.base import Family
from grpo_worker.megatron.families.deepseek_v3 import DEEPSEEK_V3, KIMI_K2
from grpo_worker.megatron.families.glm4_moe import GLM4_MOE
from grpo_worker.megatron.families.llama import LLAMA
from grpo_worker.megatron.families.qwen2 import QWEN2
from grpo_worker.megatron.families.qwen3 import QWEN3, QWEN3_MOE

_ALL = (DEEPSEEK_V3, GLM4_MOE, KIMI_K2, LLAMA, QWEN2, QWEN3, QWEN3_MOE)
_FAMILIES = {family.model_type: family for family in _ALL}


def family_of(hf: dict[str, Any]) -> Family:
    """Return the family of a config.json.

    Raises ValueError that lists the supported families.
    """
    kind = hf.get("model_type")
    if kind not in _FAMILIES:
        known = ", ".join(sorted(_FAMILIES))
        raise ValueError(f"config.json: model_type {kind!r} is not supported: use one of {known}")
    return _FAMILIES[kind]


def expert_layers(hf: dict[str, Any]) -> ExpertLayers:
    """Return which layers of a model have experts.

    Raises ValueError for a dense model.
    """
    fields = family_of(hf).fields(hf)
    if "moe_layer_freq" not in fields:
        raise ValueError(f"algorithm.routingReplay: a {hf['model_type']} model has no experts: remove it")
    moe = tuple(layer for layer, is_moe in enumerate(fields["moe_layer_freq"]) if is_moe)
    return ExpertLayers(hf["num_hidden_layers"], moe, hf["num_experts_per_tok"])
