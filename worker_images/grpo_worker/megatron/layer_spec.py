"""Layer specification of DeepSeek-V3 from Megatron-Core's public parts, without Transformer Engine."""

import math
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
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


class RMSNorm(torch.nn.Module):
    """RMS norm whose weight may be sequence-parallel, which WrappedTorchNorm refuses.

    x: [..., hidden], any float dtype; the mean is taken in fp32. Same shape and dtype out.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Marks the gradient for the all-reduce over the TP group.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class CoreAttention(MegatronModule):  # type: ignore[misc]
    """Causal softmax attention for value heads of any width and for context parallelism.

    query, key: [s, b, heads, d_qk]; value: [s, b, heads, d_v]. Returns [s, b, heads * d_v].
    """

    def __init__(
        self, config: Any, softmax_scale: float | None = None, pg_collection: Any = None, **_: Any
    ) -> None:
        super().__init__(config=config)
        # Attention's constructor first builds one without a scale; MLA replaces it by its own.
        self.scale = math.nan if softmax_scale is None else softmax_scale
        self.cp: Any = getattr(pg_collection, "cp", None)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor:
        length, visible = query.shape[0], None
        if self.cp is not None and self.cp.size() > 1:
            key = gather_from_sequence_parallel_region(key, group=self.cp)
            value = gather_from_sequence_parallel_region(value, group=self.cp)
            key_at = self._zigzag(length, query.device)
            start = self.cp.rank() * length
            visible = key_at[start : start + length, None] >= key_at[None, :]
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))  # b, heads, s, d
        # PyTorch's own choice of kernel; on a GPU none of them keeps the matrix of scores.
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, is_causal=visible is None, scale=self.scale
        )
        out = out.permute(2, 0, 1, 3)
        return out.reshape(*out.shape[:2], -1)

    def _zigzag(self, length: int, device: torch.device) -> torch.Tensor:
        """Global positions held by all CP ranks in order: rank r has chunks r and 2*cp-1-r."""
        size, half = self.cp.size(), length // 2
        chunks = [chunk for rank in range(size) for chunk in (rank, 2 * size - 1 - rank)]
        positions = [torch.arange(c * half, (c + 1) * half) for c in chunks]
        return torch.cat(positions).to(device)


def layer_spec(config: Any, moe: bool) -> ModuleSpec:
    """One transformer layer: MLA, then a dense MLP or experts.

    The two down projections are duplicated over TP ranks: with ColumnParallelLinear the
    forward is right but the rotary key's gradient is not summed over TP (14 % off).
    """
    column = ColumnParallelLinear
    attention = MLASelfAttentionSubmodules(
        linear_q_proj=column,
        linear_q_down_proj=Linear,
        linear_q_up_proj=column,
        linear_kv_down_proj=Linear,
        linear_kv_up_proj=column,
        core_attention=CoreAttention,
        linear_proj=RowParallelLinear,
        q_layernorm=RMSNorm,
        kv_layernorm=RMSNorm,
    )
    experts = config.num_moe_experts if moe else None
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=ModuleSpec(
                module=MLASelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=attention,
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=get_mlp_module_spec_for_backend(
                LocalSpecProvider(), num_experts=experts, moe_grouped_gemm=False
            ),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def block_spec(config: Any) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage."""
    specs = [layer_spec(config, bool(moe)) for moe in config.moe_layer_freq]
    offset = get_transformer_layer_offset(config)
    local = specs[offset : offset + get_num_layers_to_build(config)]
    return TransformerBlockSubmodules(layer_specs=local, layer_norm=RMSNorm)
