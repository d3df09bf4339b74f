"""Functions that run on ranks: the part of each tensor that a real rank holds."""

import torch.distributed as dist

from grpo_operator.api.v1alpha1.layout import Layout
from grpo_worker.megatron.conversion import hf_mapping
from grpo_worker.megatron.families.registry import family_of
from grpo_worker.megatron.model.build import build_chunks, initialize_parallel
from support.tiny_models import tiny_model

Part = tuple[str, int, int, int, int]


def held(model: str, layout: dict[str, int]) -> list[Part]:
    """Return (tensor, top, bottom, left, right) of each part on this rank."""
    hf, parallel = tiny_model(model), Layout(world=dist.get_world_size(), **layout)
    initialize_parallel(parallel, 0)
    parts = []
    for shard in hf_mapping.shards(build_chunks(hf, parallel), family_of(hf)):
        ends = [(0, size) for size in (*shard.shape, 1)[:2]]
        ends[shard.dim] = (shard.offset, shard.offset + shard.tensor.shape[shard.dim])
        (top, bottom), (left, right) = ends
        parts.append((shard.name, top, bottom, left, right))
    return parts
