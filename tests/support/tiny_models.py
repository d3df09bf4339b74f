"""Small models of every family for tests."""

from typing import Any

from grpo_operator.api.catalog.architectures import architecture

_GROUPED: dict[str, Any] = {
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
_EXPERTS: dict[str, Any] = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "num_nextn_predict_layers": 0,
}
# Published Llama and Qwen2 files name no head_dim: their heads divide the hidden size.
_DIVIDED = {field: value for field, value in _GROUPED.items() if field != "head_dim"}
# Name -> (architecture, changes of it).
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": ("tiny-moe", {"num_hidden_layers": 4}),
    "deepseek_v3-7-layers": ("tiny-moe", {"num_hidden_layers": 7}),
    "qwen3": ("qwen3-8b", _GROUPED | {"tie_word_embeddings": False}),
    "qwen3-tied": ("qwen3-8b", _GROUPED | {"tie_word_embeddings": True}),
    "qwen3_moe": (
        "qwen3-30b-a3b",
        _GROUPED
        | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [1]},
    ),
    "llama": ("llama-3.1-8b", _DIVIDED),
    "llama-tied": ("llama-3.1-8b", _DIVIDED | {"tie_word_embeddings": True}),
    "qwen2": ("qwen2.5-7b", _DIVIDED),
    "glm4_moe": ("glm-4.7", _GROUPED | _EXPERTS),
    "glm4_moe-no-norms": ("glm-4.5-air", _GROUPED | _EXPERTS),
}


def tiny_model(name: str) -> dict[str, Any]:
    """Return the config.json of a small model: the ``model_type``, or that and a variant."""
    if name == "kimi_k2":
        own = ("model_type", "n_group", "topk_group", "routed_scaling_factor", "rope_theta", "rope_scaling")
        kimi = architecture("kimi-k2")
        return tiny_model("deepseek_v3") | {field: kimi[field] for field in own}
    known, changes = _MODELS[name]
    return architecture(known) | changes
