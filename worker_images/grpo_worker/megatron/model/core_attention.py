"""Causal softmax attention through PyTorch's scaled_dot_product_attention.

It supports what Megatron-Core's own attention lacks without Transformer Engine: value heads whose width
differs from the keys' (MLA), grouped keys, context parallelism and packed sequences.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from grpo_worker.common.context_spans import zigzag_chunks


class CoreAttention(MegatronModule):  # type: ignore[misc]
    """query: [s, b, heads, d_qk], key: [s, b, groups, d_qk], value: [s, b, groups, d_v].

    Returns [s, b, heads * d_v]. With packed sequences the axes s and b are one axis t of tokens. Of each
    sequence a context-parallel rank has two chunks; see ``zigzag_chunks``.
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
        if packed_seq_params is None:
            return self._attended(query, key, value, [len(query)]).flatten(2)
        bounds = packed_seq_params.cu_seqlens_q.tolist()
        lengths = [(end - start) // self._ranks for start, end in pairwise(bounds)]
        return self._attended(query[:, None], key[:, None], value[:, None], lengths).flatten(1)

    @property
    def _ranks(self) -> int:
        return 1 if self.cp is None else int(self.cp.size())

    def _attended(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: Sequence[int]
    ) -> torch.Tensor:
        """Attend within each sequence separately, which avoids a mask of all tokens by all tokens."""
        queries = torch.split(query, list(lengths))
        parts = zip(queries, self._whole(key, lengths), self._whole(value, lengths), strict=True)
        return torch.cat([self._sequence(*part) for part in parts])

    def _whole(self, tokens: torch.Tensor, lengths: Sequence[int]) -> Sequence[torch.Tensor]:
        """Return all tokens of each sequence, of which this rank has ``lengths``."""
        if self._ranks == 1:
            return torch.split(tokens, list(lengths))
        gathered = gather_from_sequence_parallel_region(tokens, group=self.cp)
        by_rank = gathered.view(self._ranks, *tokens.shape)
        return [_in_order(part) for part in torch.split(by_rank, list(lengths), dim=1)]

    def _sequence(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attend within one sequence: each chunk of this rank sees the keys up to its end."""
        if self._ranks == 1:
            return self._attend(query, key, value)
        rank, size = self.cp.rank(), len(query) // 2
        ends = [(number + 1) * size for number in zigzag_chunks(self._ranks)[2 * rank : 2 * rank + 2]]
        chunks = zip(torch.split(query, size), ends, strict=True)
        return torch.cat([self._attend(chunk, key[:end], value[:end]) for chunk, end in chunks])

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attend to the keys before each query; the last query has the last key."""
        square = len(query) == len(key)
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))  # b, heads, s, d
        # PyTorch chooses the kernel; none of those on a GPU stores the matrix of scores.
        out: torch.Tensor = scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=None if square else causal_lower_right(len(query), len(key)),
            is_causal=square,
            scale=self.scale,
            enable_gqa=k.shape[1] != q.shape[1],
        )
        return out.permute(2, 0, 1, 3)


def _in_order(by_rank: torch.Tensor) -> torch.Tensor:
    """Return the tokens of a sequence in order, from the two chunks of each rank: [ranks, tokens, ...]."""
    first, second = by_rank.chunk(2, dim=1)  # chunks 0 to cp - 1, and 2 x cp - 1 down to cp
    return torch.cat([first, second.flip(0)]).flatten(0, 1)
