"""Figures of micro-batches -> figures of the global mini-batch."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from grpo_worker.megatron.model.build import device


def summed(parts: Sequence[torch.Tensor], names: Sequence[str]) -> dict[str, float]:
    """Sum [names] figures over micro-batches and data-parallel ranks, the same on every rank."""
    total = torch.stack(list(parts)).sum(0) if parts else torch.zeros(len(names), device=device())
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
    # Only the last stage computed a loss; the others contribute zeros.
    dist.all_reduce(total, group=parallel_state.get_pipeline_model_parallel_group())
    return dict(zip(names, total.tolist(), strict=True))


def largest_memory() -> dict[str, float]:
    """verl's perf/max_memory_allocated_gb: of the fullest GPU since its start. Collective."""
    if not torch.cuda.is_available():
        return {}
    most = torch.tensor(float(torch.cuda.max_memory_allocated()), device=device())
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return {"perf/max_memory_allocated_gb": float(most) / 2**30}
