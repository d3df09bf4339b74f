"""How many parameters one token is multiplied with, counted in the model that was built."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from grpo_worker.megatron.conversion.hf_mapping import shards
from grpo_worker.megatron.families.base import Family
from grpo_worker.megatron.model.build import device


def active_parameters(chunks: Sequence[Any], family: Family) -> int:
    """Over all ranks, collective. Routed experts count by the share that a token takes; the embedding
    is looked up, and only counts where it is the output projection too."""
    config = chunks[0].config
    share = (config.moe_router_topk / config.num_moe_experts) if config.num_moe_experts else 1.0
    tied = any(chunk.share_embeddings_and_output_weights for chunk in chunks)
    count = 0.0
    for shard in shards(chunks, family):
        if not shard.owner or (shard.name.endswith("embed_tokens.weight") and not tied):
            continue
        count += shard.tensor.numel() * (share if ".mlp.experts." in shard.name else 1.0)
    total = torch.tensor(count, dtype=torch.float64, device=device())
    dist.all_reduce(total)
    return round(float(total))
