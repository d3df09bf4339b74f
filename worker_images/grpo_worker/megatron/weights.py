"""DeepSeek-V3 weights: Megatron-Core shards <-> Hugging Face tensors.

Loading and publishing both go through one map from a local Megatron tensor to the boxes that
it fills in Hugging Face tensors; nothing is gathered over ranks.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state

_GLOBAL = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}

_LAYER = {
    "input_layernorm.weight": ["input_layernorm.weight"],
    "pre_mlp_layernorm.weight": ["post_attention_layernorm.weight"],
    "self_attention.linear_proj.weight": ["self_attn.o_proj.weight"],
    "self_attention.linear_q_proj.weight": ["self_attn.q_proj.weight"],
    "self_attention.linear_q_down_proj.weight": ["self_attn.q_a_proj.weight"],
    "self_attention.q_layernorm.weight": ["self_attn.q_a_layernorm.weight"],
    "self_attention.linear_q_up_proj.weight": ["self_attn.q_b_proj.weight"],
    "self_attention.linear_kv_down_proj.weight": ["self_attn.kv_a_proj_with_mqa.weight"],
    "self_attention.kv_layernorm.weight": ["self_attn.kv_a_layernorm.weight"],
    "self_attention.linear_kv_up_proj.weight": ["self_attn.kv_b_proj.weight"],
    "mlp.linear_fc1.weight": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
    "mlp.linear_fc2.weight": ["mlp.down_proj.weight"],
    "mlp.router.weight": ["mlp.gate.weight"],
    "mlp.router.expert_bias": ["mlp.gate.e_score_correction_bias"],
    "mlp.shared_experts.linear_fc1.weight": [
        "mlp.shared_experts.gate_proj.weight",
        "mlp.shared_experts.up_proj.weight",
    ],
    "mlp.shared_experts.linear_fc2.weight": ["mlp.shared_experts.down_proj.weight"],
}
_EXPERT = "mlp.experts.local_experts."
_EXPERT_PARTS = {
    "linear_fc1": ("gate_proj.weight", "up_proj.weight"),
    "linear_fc2": ("down_proj.weight",),
}


@dataclass(frozen=True, slots=True)
class Shard:
    """A box of one Hugging Face tensor held by this rank.

    ``tensor`` is a view of the local weight, so writing to it loads the weight. The box covers
    ``[offset, offset + tensor.shape[dim])`` along ``dim`` and everything along the others.
    ``owner`` is true on exactly one rank among those that hold the same box.
    """

    name: str
    shape: tuple[int, ...]
    dim: int
    offset: int
    tensor: torch.Tensor
    owner: bool


def hf_names(model: Any, name: str) -> list[str]:
    """Hugging Face names of a local Megatron tensor; gate and up share one ``linear_fc1``."""
    if name in _GLOBAL:
        return [_GLOBAL[name]]
    _, _, index, rest = name.split(".", 3)
    layer = model.decoder.layers[int(index)]
    prefix = f"model.layers.{layer.layer_number - 1}."
    if not rest.startswith(_EXPERT):
        return [prefix + part for part in _LAYER[rest]]
    local, linear, _ = rest.removeprefix(_EXPERT).split(".")
    expert = layer.mlp.local_expert_indices[int(local)]
    return [f"{prefix}mlp.experts.{expert}.{part}" for part in _EXPERT_PARTS[linear]]


def named_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, and the expert bias, which is a buffer."""
    yield from model.named_parameters()
    for name, buffer in model.named_buffers():
        if name.endswith("router.expert_bias"):
            yield name, buffer


def shards(model: Any) -> Iterator[Shard]:
    """All boxes that this rank holds, in a fixed order."""
    for name, tensor in named_tensors(model):
        size, rank, owner = _axis(name)
        sharded = getattr(tensor, "tensor_model_parallel", False) and size > 1
        names = hf_names(model, name)
        for hf_name, part in zip(names, tensor.detach().chunk(len(names)), strict=True):
            dim = int(getattr(tensor, "partition_dim", 0)) if sharded else 0
            shape = list(part.shape)
            offset = rank * shape[dim] if sharded else 0
            if sharded:
                shape[dim] *= size
            owned = owner and (sharded or rank == 0)
            yield Shard(hf_name, tuple(shape), dim, offset, part, owned)


def _axis(name: str) -> tuple[int, int, bool]:
    """(size, rank) of the tensor-parallel axis that cuts this tensor; first data replica?"""
    if ".mlp.experts." in name:
        group = parallel_state.get_expert_tensor_parallel_group()
        first = parallel_state.get_expert_data_parallel_rank() == 0
    else:
        group = parallel_state.get_tensor_model_parallel_group()
        first = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    return group.size(), group.rank(), first


@torch.no_grad()
def load(model: Any, read: Callable[[str], torch.Tensor]) -> None:
    """Fill this rank's shards; ``read`` returns one whole Hugging Face tensor.

    Raises ValueError when a tensor has another shape than the model's.
    """
    for shard in shards(model):
        whole = read(shard.name)
        if tuple(whole.shape) != shard.shape:
            raise ValueError(f"{shard.name}: shape {tuple(whole.shape)}, expected {shard.shape}")
        length = shard.tensor.shape[shard.dim]
        shard.tensor.copy_(whole.narrow(shard.dim, shard.offset, length))
