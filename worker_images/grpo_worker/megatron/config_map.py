"""DeepSeek-V3: Hugging Face ``config.json`` -> ``MLATransformerConfig``.

Values are checked against transformers on logits (tests/worker/test_parity.py). Where
Megatron-Core's default differs from DeepSeek-V3, the comment says so.
"""

from typing import Any

import torch
from megatron.core.transformer import MLATransformerConfig

from grpo_operator.api.layout import Layout


def mcore_config(hf: dict[str, Any], layout: Layout, **overrides: Any) -> MLATransformerConfig:
    """Build the Megatron-Core configuration of one rank.

    Raises ValueError for architectures that Megatron-Core cannot express.
    """
    _refuse_inexpressible(hf)
    if layout.tensor > 1 and layout.expert == 1 and layout.expert_tensor != layout.tensor:
        raise ValueError(
            f"expertTensor={layout.expert_tensor}: with tensor={layout.tensor} and expert=1 it must equal "
            "tensor: Megatron-Core would not reduce the experts' gradients"
        )
    fields = _architecture(hf) | _attention(hf) | _rope(hf) | _experts(hf) | _runtime(layout)
    return MLATransformerConfig(**(fields | overrides))


def _refuse_inexpressible(hf: dict[str, Any]) -> None:
    if hf.get("model_type") != "deepseek_v3":
        raise ValueError(f"model_type {hf.get('model_type')!r} is not supported; known: deepseek_v3")
    groups, limit, topk = hf["n_group"], hf["topk_group"], hf["num_experts_per_tok"]
    # transformers and SGLang score a group by its best 2 experts, Megatron by its best
    # topk // topk_group.
    if groups > 1 and topk // limit != 2:
        raise ValueError(
            f"num_experts_per_tok ({topk}) must be 2 x topk_group ({limit}): "
            "Megatron-Core would score the expert groups differently"
        )
    if not hf.get("norm_topk_prob", True):
        raise ValueError("norm_topk_prob=false cannot be expressed in Megatron-Core")


def _architecture(hf: dict[str, Any]) -> dict[str, Any]:
    return {
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "ffn_hidden_size": hf["intermediate_size"],
        "num_attention_heads": hf["num_attention_heads"],
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf["rms_norm_eps"],
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


def _attention(hf: dict[str, Any]) -> dict[str, Any]:
    return {
        "multi_latent_attention": True,
        "q_lora_rank": hf["q_lora_rank"],
        "kv_lora_rank": hf["kv_lora_rank"],
        "qk_head_dim": hf["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": hf["qk_rope_head_dim"],
        "v_head_dim": hf["v_head_dim"],
        "qk_layernorm": True,
        "attention_softmax_in_fp32": True,
        # MLA de-interleaves by itself; True raises.
        "rotary_interleaved": False,
    }


def _rope(hf: dict[str, Any]) -> dict[str, Any]:
    scaling = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    yarn = scaling.get("rope_type", scaling.get("type")) == "yarn"
    mscale, mscale_all_dim = scaling.get("mscale", 1.0), scaling.get("mscale_all_dim", 0.0)
    return {
        "rope_type": "yarn" if yarn else "rope",
        "rotary_base": hf.get("rope_theta") or scaling["rope_theta"],
        # MLA applies mscale whatever the rope type: without YaRN the factor must be 1.
        "rotary_scaling_factor": scaling["factor"] if yarn else 1.0,
        "original_max_position_embeddings": scaling.get(
            "original_max_position_embeddings", hf["max_position_embeddings"]
        ),
        "beta_fast": scaling.get("beta_fast", 32),
        "beta_slow": scaling.get("beta_slow", 1),
        # With either absent transformers falls back to the factor-only mscale, that is 1.
        "mscale": mscale if mscale and mscale_all_dim else 1.0,
        # Megatron-Core's default is 0.
        "mscale_all_dim": mscale_all_dim,
    }


def _experts(hf: dict[str, Any]) -> dict[str, Any]:
    dense = hf["first_k_dense_replace"]
    return {
        "num_moe_experts": hf["n_routed_experts"],
        "moe_ffn_hidden_size": hf["moe_intermediate_size"],
        "moe_shared_expert_intermediate_size": hf["moe_intermediate_size"] * hf["n_shared_experts"],
        "moe_layer_freq": [0] * dense + [1] * (hf["num_hidden_layers"] - dense),
        "moe_router_topk": hf["num_experts_per_tok"],
        "moe_router_num_groups": hf["n_group"],
        "moe_router_group_topk": hf["topk_group"],
        "moe_router_score_function": "sigmoid",
        "moe_router_topk_scaling_factor": hf["routed_scaling_factor"],
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 1e-3,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",  # the bias balances; no auxiliary loss under RL
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": False,
    }


def _runtime(layout: Layout) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "num_layers_in_first_pipeline_stage": layout.layers_in_first_stage,
        "num_layers_in_last_pipeline_stage": layout.layers_in_last_stage,
        "context_parallel_size": layout.context,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor,
        "sequence_parallel": layout.tensor > 1,  # MoE with TP requires it in training
        "params_dtype": torch.float32,
        "pipeline_dtype": torch.float32,
        "batch_p2p_comm": True,
        "use_cpu_initialization": True,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
    }
