"""Reduction of each rank's figures to figures of the whole gang."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from grpo_worker.megatron.conversion.hf_mapping import shards
from grpo_worker.megatron.families.base import Family
from grpo_worker.megatron.model.build import device


def summed(parts: Sequence[torch.Tensor], names: Sequence[str]) -> dict[str, float]:
    """Sum [names] figures over micro-batches and over data- and context-parallel ranks.

    Returns the same on every rank.
    """
    total = torch.stack(list(parts)).sum(0) if parts else torch.zeros(len(names), device=device())
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    # Only the last stage computed a loss; the others contribute zeros.
    dist.all_reduce(total, group=parallel_state.get_pipeline_model_parallel_group())
    return dict(zip(names, total.tolist(), strict=True))


def row_sum(values: torch.Tensor) -> torch.Tensor:
    """Return the sums [rows, 1] over all tokens of rows, of which this rank has a part [rows, tokens].

    Collective over context-parallel ranks. The values must not require a gradient.
    """
    sums = values.sum(1, keepdim=True)
    if parallel_state.get_context_parallel_world_size() > 1:
        dist.all_reduce(sums, group=parallel_state.get_context_parallel_group())
    return sums


def over_context(values: np.ndarray) -> np.ndarray:
    """Return the sums of the context-parallel ranks' values. Collective over these ranks."""
    if parallel_state.get_context_parallel_world_size() == 1:
        return values
    total = torch.from_numpy(values).to(device())
    dist.all_reduce(total, group=parallel_state.get_context_parallel_group())
    sums: np.ndarray = total.cpu().numpy()
    return sums


def largest_memory() -> dict[str, float]:
    """Return verl's perf/max_memory_allocated_gb: the peak of the fullest GPU. Collective."""
    if not torch.cuda.is_available():
        return {}
    peak = torch.tensor(float(torch.cuda.max_memory_allocated()), device=device())
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return {"perf/max_memory_allocated_gb": float(peak) / 2**30}


def all_parameters(chunks: Sequence[Any], family: Family) -> int:
    """Return how many parameters the whole model has. Collective."""
    count = sum(shard.tensor.numel() for shard in shards(chunks, family) if shard.owner)
    return round(_sum(float(count)))


def active_parameters(chunks: Sequence[Any], family: Family) -> int:
    """Return how many parameters the whole model multiplies with one token. Collective.

    Routed experts count by the share that is active for a token. The embedding is a lookup and counts only
    where it is also the output projection.
    """
    config = chunks[0].config
    share = (config.moe_router_topk / config.num_moe_experts) if config.num_moe_experts else 1.0
    tied = any(chunk.share_embeddings_and_output_weights for chunk in chunks)
    count = 0.0
    for shard in shards(chunks, family):
        if not shard.owner or (shard.name.endswith("embed_tokens.weight") and not tied):
            continue
        count += shard.tensor.numel() * (share if ".mlp.experts." in shard.name else 1.0)
    return round(_sum(count))


def _sum(count: float) -> float:
    """Return the sum over all ranks. Collective."""
    total = torch.tensor(count, dtype=torch.float64, device=device())
    dist.all_reduce(total)
    return float(total)
