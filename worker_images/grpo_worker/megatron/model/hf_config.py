"""Conversion of a Hugging Face ``config.json`` and a layout to Megatron-Core's configuration."""

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.api.v1alpha1.stages import chunk_counts, evenly_split
from grpo_worker.megatron.families.registry import family_of


def mcore_config(
    hf: dict[str, Any],
    layout: Layout,
    dtype: torch.dtype = torch.float32,
    passed: Mapping[str, Any] | None = None,
    **overrides: Any,
) -> TransformerConfig:
    """Return the Megatron-Core configuration of one rank.

    ``dtype``: of weights and activations. ``passed``: the fields of spec.trainer.megatron. ``overrides``:
    further fields of the configuration. Raises ValueError for architectures that Megatron-Core cannot
    express, and for passed fields that it refuses.
    """
    own = family_of(hf).fields(hf)
    _refuse_unreduced_experts(own, layout)
    groups = own.get("num_query_groups", layout.tensor)
    if groups % layout.tensor:
        raise ValueError(
            f"trainer.parallelism.tensor={layout.tensor} must divide num_key_value_heads={groups}, because "
            "key heads are not replicated: choose a smaller tensor"
        )
    fields = _architecture(hf) | (_MOE if "num_moe_experts" in own else {}) | own
    kind = MLATransformerConfig if own.get("multi_latent_attention") else TransformerConfig
    fields |= _runtime(layout, dtype) | _chunks(hf["num_hidden_layers"], layout) | overrides
    fitting = with_fitting_fusions(fields)
    config = kind(**fitting)  # first without the passed fields, so that they get no blame of others
    return _with_passed(kind, fitting, passed) if passed else config


def _with_passed(kind: type, own: dict[str, Any], passed: Mapping[str, Any]) -> TransformerConfig:
    try:
        return kind(**own, **passed)
    except Exception as error:
        given = ", ".join(f"{name}: {value}" for name, value in passed.items())
        raise ValueError(
            f"spec.trainer.megatron={{{given}}}: Megatron-Core refuses it with this model and layout: "
            f"{' '.join(str(error).split()) or type(error).__name__}: change or remove the field"
        ) from error


def _chunks(layers: int, layout: Layout) -> dict[str, Any]:
    """Return the layers of each model chunk, where Megatron-Core cannot split them by itself."""
    if evenly_split(layers, layout):
        return {}
    chunks = [["decoder"] * count for count in chunk_counts(layers, layout)]
    chunks[0].insert(0, "embedding")
    chunks[-1].append("loss")
    return {"pipeline_model_parallel_layout": chunks}


def with_fitting_fusions(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields without fusions that lack what they ask for."""
    unfit = {}
    if fields.get("multi_latent_attention") and fields.get("rope_type") != "yarn":
        unfit["apply_rope_fusion"] = False
    if fields.get("moe_enable_routing_replay"):
        unfit["moe_router_fusion"] = False  # it would ignore the replayed experts
    return fields | unfit


def _refuse_unreduced_experts(own: dict[str, Any], layout: Layout) -> None:
    wide = layout.tensor > 1 and layout.expert == 1 and layout.expert_tensor != layout.tensor
    if "num_moe_experts" in own and wide:
        raise ValueError(
            f"trainer.parallelism.expertTensor={layout.expert_tensor}: with tensor={layout.tensor} and "
            "expert=1 it must equal tensor, or Megatron-Core would not reduce the experts' gradients"
        )


def _architecture(hf: dict[str, Any]) -> dict[str, Any]:
    return {
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "ffn_hidden_size": hf["intermediate_size"],
        "num_attention_heads": hf["num_attention_heads"],
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf["rms_norm_eps"],
        "qk_layernorm": True,  # MLA's of the compressed queries and keys
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "attention_softmax_in_fp32": True,
        # MLA de-interleaves by itself (True raises an error); the other families rotate halves.
        "rotary_interleaved": False,
    }


def _leave(weight: torch.Tensor) -> torch.Tensor:
    return weight


_MOE = {
    "moe_router_dtype": "fp32",
    "moe_router_load_balancing_type": "none",  # no auxiliary loss under RL
    "moe_grouped_gemm": False,
}


def _runtime(layout: Layout, dtype: torch.dtype) -> dict[str, Any]:
    virtual = layout.virtual_pipeline
    return {
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": virtual if virtual > 1 else None,
        "num_layers_in_first_pipeline_stage": layout.layers_in_first_stage,
        "num_layers_in_last_pipeline_stage": layout.layers_in_last_stage,
        "context_parallel_size": layout.context,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor,
        "moe_token_dispatcher_type": "alltoall",
        "sequence_parallel": layout.tensor > 1,  # MoE with TP requires it in training
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "batch_p2p_comm": virtual == 1,  # gloo cannot pair the sends of an interleaved schedule
        "use_cpu_initialization": not torch.cuda.is_available(),
        # Every weight is loaded, so initialisation does nothing. perform_initialization=False would also
        # drop the attributes that Megatron-Core sets on sharded weights.
        "init_method": _leave,
        "output_layer_init_method": _leave,
        "embedding_init_method": _leave,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
    }
