"""Models that train from random weights (``spec.model.path: preset:NAME``), for first jobs on a new cluster.

Their tokenizer has one token for each of 128 characters.
"""

import copy
from typing import Any

from grpo_operator.api.catalog.architectures import DEEPSEEK_V3, QWEN3_30B_A3B, TINY_MOE

PRESET = "preset:"  # begins the paths of these models
_TOKENS = {name: TINY_MOE[name] for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}

# 1.2 billion parameters, of which 1.1 in experts. Heads and latents are as large as in DeepSeek-V3.
DEEPSEEK_V3_1B: dict[str, Any] = (
    DEEPSEEK_V3
    | _TOKENS
    | {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "moe_intermediate_size": 512,
        "num_hidden_layers": 12,
        "first_k_dense_replace": 1,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "q_lora_rank": 512,
        "n_routed_experts": 64,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 4,
        "num_nextn_predict_layers": 0,
    }
)

# 1.3 billion parameters, of which 1.2 in experts.
QWEN3_MOE_1B: dict[str, Any] = (
    QWEN3_30B_A3B
    | _TOKENS
    | {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "moe_intermediate_size": 384,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "num_experts": 64,
        "num_experts_per_tok": 4,
    }
)

PRESETS: dict[str, dict[str, Any]] = {
    "tiny-moe": TINY_MOE,
    "deepseek-v3-1b": DEEPSEEK_V3_1B,
    "qwen3-moe-1b": QWEN3_MOE_1B,
}


def preset(path: str) -> dict[str, Any]:
    """Return the config.json of ``preset:NAME``. Raises ValueError with the known names."""
    name = path.removeprefix(PRESET)
    if name not in PRESETS:
        known = ", ".join(PRESET + known for known in PRESETS)
        raise ValueError(f"unknown preset {path!r}: use {known}, or an absolute path")
    return copy.deepcopy(PRESETS[name])
