"""Kernels of Transformer Engine. Import this module only where Transformer Engine can be imported."""

from dataclasses import replace
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import (
    TEColumnParallelLinear,
    TEDotProductAttention,
    TELinear,
    TENorm,
    TERowParallelLinear,
)
from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.packed_seq_params import PackedSeqParams

from grpo_operator.api.v1alpha1.trainer import KernelChoice
from grpo_worker.megatron.model.kernels import Kernels, transformer_engine_fields


class Attention(TEDotProductAttention):  # type: ignore[misc]
    """Transformer Engine's attention, which needs the bounds of packed sequences on the GPU.

    Without fused rotary embeddings the other modules read them on the host, where they do not stall the GPU.
    """

    def forward(self, *args: Any, packed_seq_params: PackedSeqParams | None = None, **more: Any) -> Any:
        if packed_seq_params is not None and not packed_seq_params.cu_seqlens_q.is_cuda:
            packed_seq_params = _on_gpu(packed_seq_params)
        return super().forward(*args, packed_seq_params=packed_seq_params, **more)


def _on_gpu(packed: PackedSeqParams) -> PackedSeqParams:
    """Return ``packed`` with its bounds, int32 [sequences + 1], on the GPU. All layers share the copy."""
    copy: PackedSeqParams | None = getattr(packed, "on_gpu", None)
    if copy is None:
        bounds = packed.cu_seqlens_q.pin_memory().to(torch.cuda.current_device(), non_blocking=True)
        copy = replace(packed, cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
        packed.on_gpu = copy
    return copy


class _Provider(TESpecProvider):  # type: ignore[misc]
    """Megatron-Core's provider, with norms in modules of their own: they keep the names of the others'."""

    def fuse_layernorm_and_linear(self) -> bool:
        return False


TRANSFORMER_ENGINE = Kernels(
    KernelChoice.TRANSFORMER_ENGINE, TENorm, TELinear, TEColumnParallelLinear, TERowParallelLinear, Attention,
    _Provider(), grouped=True, fields=transformer_engine_fields(),
)  # fmt: skip
