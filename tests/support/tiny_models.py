"""Small models of every family for tests: the preset, and Qwen3 in its three forms."""

from typing import Any

from grpo_operator.api.catalog.architectures import architecture

_QWEN3: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "initializer_range": 0.06,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def tiny_model(name: str) -> dict[str, Any]:
    """Return the config.json of a small model: deepseek_v3 (4 layers), qwen3, qwen3-tied or qwen3_moe."""
    if name == "deepseek_v3":
        return architecture("tiny-moe") | {"num_hidden_layers": 4}
    if name == "qwen3_moe":
        experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        return architecture("qwen3-30b-a3b") | _QWEN3 | experts | {"mlp_only_layers": [1]}
    return architecture("qwen3-8b") | _QWEN3 | {"tie_word_embeddings": name == "qwen3-tied"}
