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
from grpo_worker.megatron.model.padded_sequences import PaddedSequences


class Attention(TEDotProductAttention):  # type: ignore[misc]
    """Transformer Engine's attention, for packed sequences too.

    It needs their bounds on the GPU. Without fused rotary embeddings the other modules read them on the host,
    where they do not stall the GPU. Deterministic, the gradient of packed sequences takes memory that grows
    with their number times all their tokens: cuDNN asks for 256 GiB for 512 sequences of 8,192 tokens
    together. So they are padded then, but for context parallelism.
    """

    def forward(self, *args: Any, packed_seq_params: PackedSeqParams | None = None, **more: Any) -> Any:
        if packed_seq_params is None:
            return super().forward(*args, **more)
        if self.config.deterministic_mode and self.config.context_parallel_size == 1:
            query, key, value, *others = args
            attend = super().forward
            return _padded(packed_seq_params, query.device).attend(
                query, key, value, lambda *tokens: attend(*tokens, *others, **more)
            )
        if not packed_seq_params.cu_seqlens_q.is_cuda:
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


def _padded(packed: PackedSeqParams, device: torch.device) -> PaddedSequences:
    """Return where the tokens of ``packed`` are when padded. All layers share it."""
    padded: PaddedSequences | None = getattr(packed, "padded", None)
    if padded is None:
        padded = PaddedSequences(packed.cu_seqlens_q.tolist(), device)
        packed.padded = padded
    return padded


class _Provider(TESpecProvider):  # type: ignore[misc]
    """Megatron-Core's provider, with norms in modules of their own: they keep the names of the others'."""

    def fuse_layernorm_and_linear(self) -> bool:
        return False


TRANSFORMER_ENGINE = Kernels(
    KernelChoice.TRANSFORMER_ENGINE, TENorm, TELinear, TEColumnParallelLinear, TERowParallelLinear, Attention,
    _Provider(), grouped=True, fields=transformer_engine_fields(),
)  # fmt: skip
