"""Built-in model architectures: Hugging Face ``config.json`` contents, without weights."""

import json
from pathlib import Path
from typing import Any

TINY_MOE: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 4,
    "moe_layer_freq": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 0,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.06,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 64,
    },
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

PRESETS: dict[str, dict[str, Any]] = {"tiny-moe": TINY_MOE}


def model_config(path: str) -> dict[str, Any]:
    """The ``config.json`` of a model: ``preset:NAME`` or a Hugging Face directory.

    Raises ValueError for an unknown preset, FileNotFoundError for a directory without one.
    """
    if path.startswith("preset:"):
        name = path.removeprefix("preset:")
        if name not in PRESETS:
            raise ValueError(f"spec.model.path: unknown preset {name!r}; known: {sorted(PRESETS)}")
        return json.loads(json.dumps(PRESETS[name]))  # type: ignore[no-any-return]
    file = Path(path) / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"spec.model.path: no config.json in {path}")
    return json.loads(file.read_text())  # type: ignore[no-any-return]
