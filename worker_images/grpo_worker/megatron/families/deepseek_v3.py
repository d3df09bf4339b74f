"""DeepSeek-V3 and Kimi-K2: fields of ``MLATransformerConfig`` from ``config.json``, tensors and names.

A test compares the logits with those of transformers (tests/worker/test_fidelity.py). Comments name the
places where Megatron-Core's default differs from DeepSeek-V3.
"""

from dataclasses import replace
from typing import Any

from grpo_worker.megatron.families.base import COMMON_NAMES, Family, Shapes
from grpo_worker.megatron.families.sigmoid_experts import EXPERT_NAMES, expert_fields, expert_shapes


def _fields(hf: dict[str, Any]) -> dict[str, Any]:
    return _attention(hf) | _rope(hf) | expert_fields(hf)


def _attention(hf: dict[str, Any]) -> dict[str, Any]:
    return {
        "multi_latent_attention": True,
        "q_lora_rank": hf["q_lora_rank"],
        "kv_lora_rank": hf["kv_lora_rank"],
        "qk_head_dim": hf["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": hf["qk_rope_head_dim"],
        "v_head_dim": hf["v_head_dim"],
    }


def _rope(hf: dict[str, Any]) -> dict[str, Any]:
    scaling = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    yarn = scaling.get("rope_type", scaling.get("type")) == "yarn"
    mscale, mscale_all_dim = scaling.get("mscale", 1.0), scaling.get("mscale_all_dim", 0.0)
    return {
        "rope_type": "yarn" if yarn else "rope",
        "rotary_base": hf.get("rope_theta") or scaling["rope_theta"],
        # MLA applies mscale for every rope type: without YaRN the factor must be 1.
        "rotary_scaling_factor": scaling["factor"] if yarn else 1.0,
        "original_max_position_embeddings": scaling.get(
            "original_max_position_embeddings", hf["max_position_embeddings"]
        ),
        "beta_fast": scaling.get("beta_fast", 32),
        "beta_slow": scaling.get("beta_slow", 1),
        # If either is absent, transformers computes mscale from the factor alone, which gives 1.
        "mscale": mscale if mscale and mscale_all_dim else 1.0,
        # Megatron-Core's default is 0.
        "mscale_all_dim": mscale_all_dim,
    }


def _layer_shapes(hf: dict[str, Any], layer: int) -> Shapes:
    return _attention_shapes(hf) | expert_shapes(hf, layer)


def _attention_shapes(hf: dict[str, Any]) -> Shapes:
    hidden, heads = hf["hidden_size"], hf["num_attention_heads"]
    nope, rope, value = hf["qk_nope_head_dim"], hf["qk_rope_head_dim"], hf["v_head_dim"]
    q_rank, kv_rank = hf["q_lora_rank"], hf["kv_lora_rank"]
    shapes: Shapes = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.kv_a_proj_with_mqa.weight": (kv_rank + rope, hidden),
        "self_attn.kv_a_layernorm.weight": (kv_rank,),
        "self_attn.kv_b_proj.weight": (heads * (nope + value), kv_rank),
        "self_attn.o_proj.weight": (hidden, heads * value),
    }
    if q_rank is None:
        return shapes | {"self_attn.q_proj.weight": (heads * (nope + rope), hidden)}
    return shapes | {
        "self_attn.q_a_proj.weight": (q_rank, hidden),
        "self_attn.q_a_layernorm.weight": (q_rank,),
        "self_attn.q_b_proj.weight": (heads * (nope + rope), q_rank),
    }


def _mtp_layer_shapes(hf: dict[str, Any]) -> Shapes:
    hidden = hf["hidden_size"]
    own: Shapes = {"enorm.weight": (hidden,), "hnorm.weight": (hidden,), "shared_head.norm.weight": (hidden,)}
    own["eh_proj.weight"] = (hidden, 2 * hidden)
    return own | _layer_shapes(hf, hf["num_hidden_layers"])


DEEPSEEK_V3 = Family(
    "deepseek_v3",
    _fields,
    _layer_shapes,
    COMMON_NAMES
    | EXPERT_NAMES
    | {
        "self_attention.linear_q_proj.weight": ("self_attn.q_proj.weight",),
        "self_attention.linear_q_down_proj.weight": ("self_attn.q_a_proj.weight",),
        "self_attention.q_layernorm.weight": ("self_attn.q_a_layernorm.weight",),
        "self_attention.linear_q_up_proj.weight": ("self_attn.q_b_proj.weight",),
        "self_attention.linear_kv_down_proj.weight": ("self_attn.kv_a_proj_with_mqa.weight",),
        "self_attention.kv_layernorm.weight": ("self_attn.kv_a_layernorm.weight",),
        "self_attention.linear_kv_up_proj.weight": ("self_attn.kv_b_proj.weight",),
    },
    mtp_layer_shapes=_mtp_layer_shapes,
)
# Kimi-K2 has layers of DeepSeek-V3 in other numbers.
KIMI_K2 = replace(DEEPSEEK_V3, model_type="kimi_k2")
