"""Layouts of weights that stand-in ranks report: which slices of each tensor a rank of the layout sends."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.plan.planner.training.stages import stage_layers
from grpo_worker.weightsync.planner.layouts import tensors_of, trainer_side
from grpo_worker.weightsync.planner.regions import BLOCK, Box, Tensor, scale_box
from grpo_worker.weightsync.protocol.buffers import aligned, item_bytes
from grpo_worker.weightsync.protocol.group_offer import PlannedTransfer, transfer_plan_of
from grpo_worker.weightsync.protocol.manifest import Manifest, Slice
from grpo_worker.weightsync.protocol.packed_layouts import pack

_Part = tuple[str, tuple[int, ...], str, int, int, int, int]  # a slice without its position in the blob


@dataclass(slots=True)
class GangLayouts:
    """Layouts that the ranks of a gang exchange among themselves, and the real plan that follows from them.

    ``packed_bytes``: of all ranks' layouts, as they travel; 0 until they were exchanged.
    """

    hf: Mapping[str, Any]
    layout: Layout
    packed_bytes: int = 0
    _texts: dict[bool, list[str]] = field(default_factory=dict)
    _planned: dict[tuple[int, bool], PlannedTransfer] = field(default_factory=dict)

    def exchange(self, fp8: bool) -> int:
        """Make every rank know the layouts; return the bytes between the ranks: 0 the next time."""
        if fp8 in self._texts:
            return 0
        self._texts[fp8] = [manifest.to_json() for manifest in manifests(self.hf, self.layout, fp8)]
        self.packed_bytes = sum(len(pack(text)) for text in self._texts[fp8])
        return self.packed_bytes * (self.layout.world - 1)

    def plan(self, bucket_bytes: int, fp8: bool) -> PlannedTransfer:
        """Return the answer of each rank, after ``exchange``."""
        key = bucket_bytes, fp8
        if key not in self._planned:
            self._planned[key] = PlannedTransfer(transfer_plan_of(self._texts[fp8], bucket_bytes).plan_id)
        return self._planned[key]


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
    yield _part(name, (tensor.rows, tensor.columns), tensor.dtype, box)
    if tensor.scaled:
        yield _part(f"{name}_scale_inv", (_up(tensor.rows), _up(tensor.columns)), "float32", scale_box(box))


def _part(name: str, shape: tuple[int, int], dtype: str, box: Box) -> _Part:
    dim = int((box.left, box.right) != (0, shape[1]))
    offset, end = (box.left, box.right) if dim else (box.top, box.bottom)
    whole = shape if shape[1] > 1 else shape[:1]
    return name, whole, dtype, dim, offset, end - offset, box.size * item_bytes(dtype)


def _up(size: int) -> int:
    return -(-size // BLOCK)
