"""Activations that leave the GPU between forward and backward pass, as Megatron-Core offloads them (pure).

Megatron-Core copies every tensor that a module saves. One that another module saves too stays on the GPU.
For norms the copied bytes are those of an H200; benchmarks/gpu/activation_offload.py measures the others too.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from grpo_operator.api.v1alpha1.offload import OffloadModule
from grpo_operator.plan.planner.model.shape import GqaShape, ModelShape

_BF16 = 2
_SMALLEST = 2**20  # values; Megatron-Core leaves smaller tensors on the GPU (min_offloaded_tensor_size)
PINNED = 2  # at most: torch's allocator of pinned memory rounds each tensor up to a power of two
# Layers whose tensors are on the GPU all the same: one that is copied out or in, and the next one.
UNDERWAY = 2


@dataclass(frozen=True, slots=True)
class Offloaded:
    """Bytes of one layer and micro-batch. ``leaving``: freed on the GPU. ``copied``: in host memory."""

    leaving: int = 0
    copied: int = 0


def offloaded(
    model: ModelShape, modules: tuple[OffloadModule, ...], layer: int, tokens: int, ranks: int
) -> Offloaded:
    """Return what ``modules`` of a layer offload. ``tokens``: split over ``ranks`` tensor-parallel ranks."""
    if not modules:
        return Offloaded()
    leaving = copied = 0
    for module in modules:
        for width, leaves in _tensors(model, module, layer):
            values = tokens * width // ranks
            if values >= _SMALLEST:
                copied += _BF16 * values
                leaving += _BF16 * values * leaves
    return Offloaded(leaving, copied)


def missing(model: ModelShape, module: OffloadModule) -> str:
    """Return why no layer of the model has such a module, with the remedy, or ""."""
    if any(True for _ in _tensors(model, module, model.layers - 1)):
        return ""
    return f"a {model.model_type} model has no experts: remove {module}"


def _tensors(model: ModelShape, module: OffloadModule, layer: int) -> Iterator[tuple[int, bool]]:
    """Yield values per token of each tensor that a module saves, and whether it leaves the GPU."""
    experts = model.experts if layer >= model.dense_layers else None
    if module in (OffloadModule.ATTN_NORM, OffloadModule.MLP_NORM):
        yield model.hidden, True
    elif module is OffloadModule.QKV_LINEAR:
        yield from _projections(model)
    elif module is OffloadModule.CORE_ATTN:
        yield from _attention(model)
    elif module is OffloadModule.ATTN_PROJ:
        yield _output(model), True
    elif module is OffloadModule.EXPERT_FC1 and experts is not None:
        yield experts.top_k * model.hidden, True
    elif module is OffloadModule.MOE_ACT and experts is not None:
        yield 2 * experts.top_k * experts.ffn, True


def _projections(model: ModelShape) -> Iterator[tuple[int, bool]]:
    """Yield the norm's output and, with latent attention, queries, keys and values in compressed form."""
    shape = model.attention
    yield model.hidden, True
    if isinstance(shape, GqaShape):
        return
    if shape.q_rank is not None:
        yield model.hidden, False  # each of the two down projections saves it
        yield shape.q_rank, True  # before its norm, and after it
        yield shape.q_rank, True
    yield shape.kv_rank, True
    yield shape.kv_rank, True


def _attention(model: ModelShape) -> Iterator[tuple[int, bool]]:
    """Yield queries, keys, values, and the output, which the projection after it saves too."""
    shape = model.attention
    if isinstance(shape, GqaShape):
        yield shape.head * model.heads, True
        yield shape.head * shape.kv_heads, True
        yield shape.head * shape.kv_heads, True
    else:
        yield (shape.nope + shape.rope) * model.heads, True
        yield (shape.nope + shape.rope) * model.heads, True
        yield shape.value * model.heads, True
    yield _output(model), False


def _output(model: ModelShape) -> int:
    shape = model.attention
    return model.heads * (shape.head if isinstance(shape, GqaShape) else shape.value)
