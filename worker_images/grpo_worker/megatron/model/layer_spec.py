"""Layer specifications from Megatron-Core's public parts, without Transformer Engine."""

from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.moe import moe_utils
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

from grpo_worker.megatron.model.core_attention import CoreAttention
from grpo_worker.megatron.model.router import Router

# Without Transformer Engine, which these parts do not use, Megatron-Core silently imports mocks, on
# which isinstance() fails, and leaves a name unbound that it reads later.
multi_latent_attention.HAVE_TE = False
moe_utils.__dict__.setdefault("te_general_gemm", None)


class RMSNorm(torch.nn.Module):
    """RMS norm that supports sequence parallelism, which Megatron-Core's WrappedTorchNorm refuses.

    x: [..., hidden], any float dtype; the mean is computed in fp32. The result has x's shape and dtype.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Marks the gradient for the all-reduce over the TP group.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


def layer_spec(config: Any, moe: bool) -> ModuleSpec:
    """Return the specification of one transformer layer: attention, then a dense MLP or experts."""
    experts = config.num_moe_experts if moe else None
    attention = _latent_attention() if config.multi_latent_attention else _grouped_attention(config)
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=_mlp(experts),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _mlp(experts: int | None) -> ModuleSpec:
    """Return the specification of a dense MLP, or of ``experts`` with their router."""
    spec: ModuleSpec = get_mlp_module_spec_for_backend(
        LocalSpecProvider(), num_experts=experts, moe_grouped_gemm=False
    )
    if experts is not None:
        spec.submodules.router = Router
    return spec


def _latent_attention() -> ModuleSpec:
    """Return the specification of multi-head latent attention (MLA).

    The two down projections are duplicated over TP ranks: with ColumnParallelLinear the forward pass is
    right, but the rotary key's gradient is not summed over TP (14 % off).
    """
    submodules = MLASelfAttentionSubmodules(
        linear_q_proj=ColumnParallelLinear,
        linear_q_down_proj=Linear,
        linear_q_up_proj=ColumnParallelLinear,
        linear_kv_down_proj=Linear,
        linear_kv_up_proj=ColumnParallelLinear,
        core_attention=CoreAttention,
        linear_proj=RowParallelLinear,
        q_layernorm=RMSNorm,
        kv_layernorm=RMSNorm,
    )
    return ModuleSpec(MLASelfAttention, {"attn_mask_type": AttnMaskType.causal}, submodules)


def _grouped_attention(config: Any) -> ModuleSpec:
    """Return the specification of grouped-query attention, with query and key norms if the model has them."""
    norm = RMSNorm if config.qk_layernorm else None
    submodules = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=CoreAttention,
        linear_proj=RowParallelLinear,
        q_layernorm=norm,
        k_layernorm=norm,
    )
    return ModuleSpec(SelfAttention, {"attn_mask_type": AttnMaskType.causal}, submodules)


def block_spec(config: Any, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Return the layers of this pipeline stage, or of its model chunk ``vp_stage``."""
    frequency = config.moe_layer_freq
    moe = frequency if isinstance(frequency, list) else [config.num_moe_experts is not None]
    specs = {kind: layer_spec(config, kind) for kind in set(map(bool, moe))}
    offset = get_transformer_layer_offset(config, vp_stage)
    local = range(offset, offset + get_num_layers_to_build(config, vp_stage))
    layers = [specs[bool(moe[layer % len(moe)])] for layer in local]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)
