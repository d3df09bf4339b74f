"""Layouts of weights that stand-in ranks report: which slices of each tensor a rank of the layout sends."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.plan.planner.training.stages import stage_layers
from grpo_worker.weightsync.planner.layouts import tensors_of, trainer_side
from grpo_worker.weightsync.planner.regions import BLOCK, Box, Tensor
from grpo_worker.weightsync.protocol.buffers import aligned
from grpo_worker.weightsync.protocol.manifest import Manifest, Slice

_DTYPES = {8: "float8_e4m3fn", 16: "bfloat16", 32: "float32"}
_Part = tuple[str, tuple[int, ...], str, int, int, int, int]  # a slice without its position in the blob


def manifests(hf: Mapping[str, Any], layout: Layout, fp8: bool) -> list[Manifest]:
    """Return the manifest of each rank. Slices that several ranks hold are sent by the first of them."""
    tensors = tensors_of(hf, fp8)
    stages = stage_layers(int(hf["num_hidden_layers"]), layout)
    stage_of = {layer: stage for stage, layers in enumerate(stages) for layer in layers}
    owned: dict[int, list[Slice]] = defaultdict(list)
    ends: dict[int, int] = defaultdict(int)
    for held in trainer_side(hf, layout, stage_of.__getitem__):
        rank = held.ranks[0]
        for name, shape, dtype, dim, offset, length, nbytes in _parts(
            held.tensor, tensors[held.tensor], held.box
        ):
            owned[rank].append(Slice(name, shape, dtype, dim, offset, length, ends[rank], nbytes))
            ends[rank] += aligned(nbytes)
    world = layout.world
    return [Manifest(0, rank, world, ends[rank], "", tuple(owned[rank])) for rank in range(world)]


def _parts(name: str, tensor: Tensor, box: Box) -> Iterator[_Part]:
    """Yield the slice of a box, and that of its scales in FP8."""
    yield _part(name, (tensor.rows, tensor.columns), tensor.bits, box)
    if tensor.scaled:
        scales = Box(box.top // BLOCK, _up(box.bottom), box.left // BLOCK, _up(box.right))
        yield _part(f"{name}_scale_inv", (_up(tensor.rows), _up(tensor.columns)), 32, scales)


def _part(name: str, shape: tuple[int, int], bits: int, box: Box) -> _Part:
    dim = int((box.left, box.right) != (0, shape[1]))
    offset, end = (box.left, box.right) if dim else (box.top, box.bottom)
    whole = shape if shape[1] > 1 else shape[:1]
    return name, whole, _DTYPES[bits], dim, offset, end - offset, box.size * bits // 8


def _up(size: int) -> int:
    return -(-size // BLOCK)
