"""Mapping between Megatron-Core shards of this rank and boxes of Hugging Face tensors.

Loading, publishing and exporting use the same map from a local Megatron tensor to the boxes that it
occupies in Hugging Face tensors; nothing is gathered over ranks.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state

from grpo_worker.megatron.conversion.readers import WeightReader
from grpo_worker.megatron.families.base import (
    EXPERT_PARTS,
    GLOBAL_NAMES,
    MTP_LAYER,
    MTP_NAMES,
    QKV,
    Family,
    first_rows,
)
from grpo_worker.megatron.model.value_head import NAME as VALUE_HEAD
from grpo_worker.megatron.model.value_head import ValueHead
from grpo_worker.megatron.versions import MTP_INNER_LAYER
from grpo_worker.profiling.progress import PROGRESS, READ

_EXPERT = re.compile(  # those of the kernels: each in modules of its own, or all in one
    r"mlp\.experts\.(?:local_experts\.(?P<own>\d+)\.)?(?P<linear>linear_fc[12])\.weight(?P<shared>\d*)"
)


@dataclass(frozen=True, slots=True)
class Shard:
    """A box of one Hugging Face tensor held by this rank.

    ``shape`` is that of the whole tensor. ``tensor`` is a view of the local weight, so writing to it loads
    the weight. The box covers ``[offset, offset + tensor.shape[dim])`` along ``dim`` and everything along
    the other dimensions. ``owner`` is true on exactly one of the ranks that hold the same box.
    """

    name: str
    shape: tuple[int, ...]
    dim: int
    offset: int
    tensor: torch.Tensor
    owner: bool


def named_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the parameters and the expert bias, which is a buffer."""
    yield from model.named_parameters()
    for name, buffer in model.named_buffers():
        if name.endswith("router.expert_bias"):
            yield name, buffer


def hf_names(model: Any, family: Family, name: str) -> tuple[str, ...]:
    """Return the Hugging Face names of a local Megatron tensor.

    There are several where Megatron-Core fuses tensors: gate and up projection share one ``linear_fc1``.
    """
    if name == "output_layer.weight" and isinstance(model.output_layer, ValueHead):
        return (VALUE_HEAD,)
    if name in GLOBAL_NAMES:
        tied = name == "output_layer.weight" and model.share_embeddings_and_output_weights
        return ("model.embed_tokens.weight" if tied else GLOBAL_NAMES[name],)
    if name.startswith(f"{MTP_LAYER}."):
        rest = name.removeprefix(f"{MTP_LAYER}.")
        prefix = f"model.layers.{model.config.num_layers}."
        if rest in MTP_NAMES:
            return (prefix + MTP_NAMES[rest],)
        rest, layer = rest.removeprefix(f"{MTP_INNER_LAYER}."), getattr(model, MTP_LAYER).inner_layer
    else:
        _, _, index, rest = name.split(".", 3)
        layer = model.decoder.layers[int(index)]
        prefix = f"model.layers.{layer.layer_number - 1}."
    match = _EXPERT.fullmatch(rest)
    if match is None:
        return tuple(prefix + part for part in family.layer_names[rest])
    expert = layer.mlp.local_expert_indices[int(match["own"] or match["shared"])]
    return tuple(f"{prefix}mlp.experts.{expert}.{part}" for part in EXPERT_PARTS[match["linear"]])


def shards(chunks: Sequence[Any], family: Family) -> Iterator[Shard]:
    """Return all boxes that this rank holds in its model chunks, in a fixed order."""
    for model in chunks:
        for name, tensor in named_tensors(model):
            names, data = hf_names(model, family, name), tensor.detach()
            group, owner = axis(name)
            size, rank = group.size(), group.rank()
            if name == "output_layer.weight" and names[0] == "model.embed_tokens.weight":
                owner = False  # the last stage's copy of tied embeddings
            if QKV in name:
                yield from _groups(model.config, names, data, rank, owner)
                continue
            cut = _partition_dim(name, tensor)
            sharded = cut is not None and size > 1
            for hf_name, part in zip(names, data.chunk(len(names)), strict=True):
                dim = cut if cut is not None and sharded else 0
                shape = list(part.shape)
                offset = rank * shape[dim] if sharded else 0
                if sharded:
                    shape[dim] *= size
                owned = owner and (sharded or rank == 0)
                yield Shard(hf_name, tuple(shape), dim, offset, part, owned)


def _partition_dim(name: str, tensor: torch.Tensor) -> int | None:
    """Return the dimension along which tensor-parallel ranks share a tensor, or None."""
    match = _EXPERT.search(name)
    if match is not None:  # Transformer Engine does not mark experts
        return 0 if match["linear"] == "linear_fc1" else 1
    return int(tensor.partition_dim) if getattr(tensor, "tensor_model_parallel", False) else None  # type: ignore[attr-defined]


def _groups(
    config: Any, names: tuple[str, ...], data: torch.Tensor, rank: int, owner: bool
) -> Iterator[Shard]:
    """Return the boxes of a fused weight or bias, group by group.

    ``data``: [groups x (queries + key + value) x head, hidden], or without the last dimension.
    """
    head, groups = config.kv_channels, config.num_query_groups
    widths = (config.num_attention_heads // groups * head, head, head)
    local = data.shape[0] // sum(widths)
    for name, width, rows in zip(names, widths, first_rows(widths, local), strict=True):
        for group, first in enumerate(rows):
            offset = (rank * local + group) * width
            shape = (groups * width, *data.shape[1:])
            yield Shard(name, shape, 0, offset, data[first : first + width], owner)


def axis(name: str) -> tuple[Any, bool]:
    """Return (tensor-parallel group that shards this tensor, whether this is the first data replica).

    ``name``: Megatron's or Hugging Face's.
    """
    if ".mlp.experts." in name:
        first = parallel_state.get_expert_data_parallel_rank() == 0
        return parallel_state.get_expert_tensor_parallel_group(), first
    first = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    return parallel_state.get_tensor_model_parallel_group(), first


@torch.no_grad()
def load(chunks: Sequence[Any], family: Family, reader: WeightReader) -> None:
    """Load this rank's shards, one box at a time.

    Raises ValueError when a tensor's shape differs from the model's.
    """
    for shard in shards(chunks, family):
        with PROGRESS.reading():
            shape = reader.shape(shard.name)
            if shape != shard.shape:
                raise ValueError(f"{shard.name}: shape {shape}, expected {shard.shape}")
            length = shard.tensor.shape[shard.dim]
            shard.tensor.copy_(reader.read(shard.name, shard.dim, shard.offset, length))
        PROGRESS.add(READ, shard.tensor.nbytes)
