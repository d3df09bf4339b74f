"""Causal softmax attention through PyTorch's scaled_dot_product_attention.

It supports what Megatron-Core's own attention lacks without Transformer Engine: value heads whose width
differs from the keys' (MLA), grouped keys, context parallelism and packed sequences.
"""

from itertools import pairwise
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch.nn.functional import scaled_dot_product_attention

from grpo_worker.common.context_spans import zigzag_chunks


class CoreAttention(MegatronModule):  # type: ignore[misc]
    """query: [s, b, heads, d_qk], key: [s, b, groups, d_qk], value: [s, b, groups, d_v].

    Returns [s, b, heads * d_v]. With packed sequences the axes s and b are one axis t of tokens.
    """

    def __init__(
        self, config: Any, softmax_scale: float | None = None, pg_collection: Any = None, **_: Any
    ) -> None:
        super().__init__(config=config)
        # None: 1 / sqrt(d_qk). MLA passes its own scale, which YaRN changes.
        self.scale = softmax_scale
        self.cp: Any = getattr(pg_collection, "cp", None)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *_: Any,
        packed_seq_params: Any = None,
        **__: Any,
    ) -> torch.Tensor:
        if packed_seq_params is not None:
            return self._packed(query, key, value, packed_seq_params.cu_seqlens_q.tolist())
        visible = None
        if self.cp is not None and self.cp.size() > 1:
            length = query.shape[0]
            key = gather_from_sequence_parallel_region(key, group=self.cp)
            value = gather_from_sequence_parallel_region(value, group=self.cp)
            key_at = _zigzag(length, self.cp.size()).to(query.device)
            start = self.cp.rank() * length
            visible = key_at[start : start + length, None] >= key_at[None, :]
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))  # b, heads, s, d
        out = self._attend(q, k, v, visible).permute(2, 0, 1, 3)
        return out.reshape(*out.shape[:2], -1)

    def _packed(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: list[int]
    ) -> torch.Tensor:
        """Attend within each sequence separately, which avoids a mask of all tokens by all tokens."""
        lengths = [end - start for start, end in pairwise(bounds)]
        heads_first = (t.transpose(0, 1) for t in (query, key, value))
        parts = zip(*(torch.split(t, lengths, dim=1) for t in heads_first), strict=True)
        out = [self._attend(q[None], k[None], v[None], None)[0] for q, k, v in parts]
        return torch.cat(out, dim=1).transpose(0, 1).flatten(1)

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor | None
    ) -> torch.Tensor:
        # PyTorch chooses the kernel; none of those on a GPU stores the matrix of scores.
        return scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=visible,
            is_causal=visible is None,
            scale=self.scale,
            enable_gqa=k.shape[1] != q.shape[1],
        )


def _zigzag(length: int, size: int) -> torch.Tensor:
    """Return the global positions of the tokens of all CP ranks, in rank order."""
    half = length // 2
    return torch.cat([torch.arange(c * half, (c + 1) * half) for c in zigzag_chunks(size)])
