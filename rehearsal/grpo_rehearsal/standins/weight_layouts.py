"""Layouts of weights that stand-in ranks report: which slices of each tensor a rank holds."""

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.api.v1alpha1.stages import stage_layers
from grpo_worker.weightsync.planner.boxes import SCALES
from grpo_worker.weightsync.planner.layouts import tensors_of, trainer_side
from grpo_worker.weightsync.planner.regions import BLOCK, Box, Tensor, scale_box
from grpo_worker.weightsync.protocol.manifest import Slice


def layouts(hf: Mapping[str, Any], layout: Layout, fp8: bool) -> list[list[Slice]]:
    """Return the slices that each rank holds, copies of other ranks' included."""
    tensors = tensors_of(hf, fp8)
    stages = stage_layers(int(hf["num_hidden_layers"]), layout)
    stage_of = {layer: stage for stage, layers in enumerate(stages) for layer in layers}
    result: list[list[Slice]] = [[] for _ in range(layout.world)]
    for held in trainer_side(hf, layout, stage_of.__getitem__):
        slices = list(_slices(held.tensor, tensors[held.tensor], held.box))
        for rank in held.ranks:
            result[rank] += slices
    return result


def packed(slices: Sequence[Slice]) -> bytes:
    """Return a rank's layout as ``grpo_worker.weightsync.trainer.links`` sends it to the first rank."""
    rows = [[s.name, s.shape, s.dtype, s.dim, s.offset, s.length] for s in slices]
    return zlib.compress(json.dumps(rows).encode())


def _slices(name: str, tensor: Tensor, box: Box) -> Iterator[Slice]:
    """Yield the slice of a box, and that of its scales in FP8."""
    yield _slice(name, (tensor.rows, tensor.columns), tensor.dtype, box)
    if tensor.scaled:
        shape = -(-tensor.rows // BLOCK), -(-tensor.columns // BLOCK)
        yield _slice(name + SCALES, shape, "float32", scale_box(box))


def _slice(name: str, shape: tuple[int, int], dtype: str, box: Box) -> Slice:
    dim = int((box.left, box.right) != (0, shape[1]))
    offset, end = (box.left, box.right) if dim else (box.top, box.bottom)
    whole = shape if shape[1] > 1 else shape[:1]
    return Slice(name, whole, dtype, dim, offset, end - offset, 0, 0)  # layouts have no place in a blob
