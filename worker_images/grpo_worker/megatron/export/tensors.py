"""Assembly of whole tensors from all ranks' shards."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist

from grpo_worker.megatron.conversion.hf_mapping import axis, shards
from grpo_worker.megatron.families.base import Family
from grpo_worker.megatron.host_sync.barrier import store_barrier


def whole_tensors(chunks: Sequence[Any], family: Family) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the tensors that this rank writes. Collective in each tensor-parallel group."""
    for name, boxes in groupby(shards(chunks, family), key=lambda shard: shard.name):
        parts = list(boxes)
        if not parts[0].owner:  # all ranks that gather a sharded tensor are owners of their boxes
            continue
        tensor = torch.cat([box.tensor for box in parts], dim=parts[0].dim)
        if tuple(tensor.shape) == parts[0].shape:
            yield name, tensor
            continue
        whole = _gathered(tensor, parts[0].dim, axis(name)[0])
        if whole is not None:
            yield name, whole


def _gathered(tensor: torch.Tensor, dim: int, group: Any) -> torch.Tensor | None:
    """Gather the parts of a group's ranks on its first rank; return None on the others."""
    store_barrier(dist.get_process_group_ranks(group)).wait()  # the first rank may be writing a file
    tensor = tensor.contiguous()
    parts = [torch.empty_like(tensor) for _ in range(group.size())] if group.rank() == 0 else None
    dist.gather(tensor, parts, group=group, group_dst=0)
    return torch.cat(parts, dim=dim) if parts else None
