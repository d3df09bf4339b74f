"""Layer specifications from Megatron-Core's public parts, with the kernels of a job."""

from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_latent_attention import (
    MLASelfAttention,
    MLASelfAttentionSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from grpo_worker.megatron.model.kernels import Kernels
from grpo_worker.megatron.model.router import Router
from grpo_worker.megatron.versions import submodules_of


def layer_spec(config: Any, moe: bool, kernels: Kernels) -> ModuleSpec:
    """Return the specification of one transformer layer: attention, then a dense MLP or experts."""
    experts = config.num_moe_experts if moe else None
    latent = config.multi_latent_attention
    attention = _latent_attention(kernels) if latent else _grouped_attention(kernels, config.qk_layernorm)
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=kernels.norm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=kernels.norm,
            mlp=_mlp(experts, kernels),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _mlp(experts: int | None, kernels: Kernels) -> Any:
    """Return the specification of a dense MLP, or of ``experts`` with their router."""
    spec = get_mlp_module_spec_for_backend(kernels.mlp, num_experts=experts, moe_grouped_gemm=kernels.grouped)
    if experts is not None:
        submodules_of(spec).router = Router
    return spec


def _latent_attention(kernels: Kernels) -> ModuleSpec:
    """Return the specification of multi-head latent attention (MLA).

    The two down projections are duplicated over TP ranks: with ColumnParallelLinear the forward pass is
    right, but the rotary key's gradient is not summed over TP (14 % off).
    """
    submodules = MLASelfAttentionSubmodules(
        linear_q_proj=kernels.column,
        linear_q_down_proj=kernels.linear,
        linear_q_up_proj=kernels.column,
        linear_kv_down_proj=kernels.linear,
        linear_kv_up_proj=kernels.column,
        core_attention=kernels.attention,
        linear_proj=kernels.row,
        q_layernorm=kernels.norm,
        kv_layernorm=kernels.norm,
    )
    return ModuleSpec(MLASelfAttention, {"attn_mask_type": AttnMaskType.causal}, submodules)


def _grouped_attention(kernels: Kernels, norms: bool) -> ModuleSpec:
    """Return the specification of grouped-query attention. ``norms``: of queries and keys."""
    norm = kernels.norm if norms else None
    submodules = SelfAttentionSubmodules(
        linear_qkv=kernels.column,
        core_attention=kernels.attention,
        linear_proj=kernels.row,
        q_layernorm=norm,
        k_layernorm=norm,
    )
    return ModuleSpec(SelfAttention, {"attn_mask_type": AttnMaskType.causal}, submodules)


def block_spec(config: Any, kernels: Kernels, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Return the layers of this pipeline stage, or of its model chunk ``vp_stage``."""
    frequency = config.moe_layer_freq
    moe = frequency if isinstance(frequency, list) else [config.num_moe_experts is not None]
    specs = {kind: layer_spec(config, kind, kernels) for kind in set(map(bool, moe))}
    offset = get_transformer_layer_offset(config, vp_stage)
    local = range(offset, offset + get_num_layers_to_build(config, vp_stage))
    layers = [specs[bool(moe[layer % len(moe)])] for layer in local]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=kernels.norm)
