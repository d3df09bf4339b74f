"""Region reader: reads regions of tensors from parameters, by running the recipe of a load backwards."""

from collections.abc import Sequence

import torch

from grpo_worker.weightsync.planner.boxes import disjoint, rectangles
from grpo_worker.weightsync.planner.regions import Box
from grpo_worker.weightsync.protocol.buffers import dtype_name
from grpo_worker.weightsync.protocol.link_exchange import TensorRow
from grpo_worker.weightsync.protocol.region_stream import RegionPart
from grpo_worker.weightsync.sglang_plugin.contents import Complete
from grpo_worker.weightsync.sglang_plugin.recipe import Recipe, RegionCopy, TensorSpec

# Sources whose values a target of the other dtype holds exactly.
_EXACT = {(torch.bfloat16, torch.float32), (torch.float16, torch.float32)}


class UnreadableError(RuntimeError):
    """A tensor cannot be read back as it was received; the message names it."""


class RegionReader:
    """Reads the regions that this rank keeps of a complete version.

    ``rows``: all tensors of the version, in the order of their numbers. ``kept``: regions of those of which
    this rank keeps a part. Raises UnreadableError.
    """

    def __init__(self, complete: Complete) -> None:
        specs: dict[str, TensorSpec] = {}
        copies: dict[str, Sequence[RegionCopy]] = {}
        for model, recipe in zip(complete.models, complete.recipes, strict=True):
            _check(model, recipe)
            specs |= recipe.specs
            # Models of one engine hold the same bytes, so one of them is read.
            copies |= {name: of for name, of in recipe.copies.items() if name not in copies}
        self._copies = [copies.get(name, ()) for name in sorted(specs)]
        self._specs = [specs[name] for name in sorted(specs)]
        self.rows = [TensorRow(spec.name, spec.shape, dtype_name(spec.dtype)) for spec in self._specs]
        self.kept = {name: _regions(specs[name], of_tensor) for name, of_tensor in copies.items()}

    def read(self, part: RegionPart, into: torch.Tensor) -> None:
        """Copy the bytes of ``part`` into ``into`` (uint8 [bytes]); a GPU may still be copying on return."""
        spec = self._specs[part.tensor]
        item, columns = spec.dtype.itemsize, part.box.right - part.box.left
        position = 0
        for top, bottom, left, right in rectangles(part.begin, part.begin + part.nbytes, columns * item):
            first, last = left // item, -(-right // item)  # a cut may lie within an element
            rows, start = part.box.top, part.box.left
            box = Box(rows + top, rows + bottom, start + first, start + last)
            found = self._elements(part.tensor, box)[left - first * item :]
            nbytes = (bottom - top) * (right - left)
            into[position : position + nbytes].copy_(found[:nbytes], non_blocking=True)
            position += nbytes

    def _elements(self, number: int, box: Box) -> torch.Tensor:
        """Return the bytes of a region, row by row, on the device of its parameters."""
        spec, pitch = self._specs[number], box.right - box.left
        device = self._copies[number][0].target.device
        found = torch.empty(box.size, dtype=spec.dtype, device=device)
        for copy in self._copies[number]:
            part = copy.part(box)
            if part is not None:
                first, size, stride = part.place_in(box, pitch)
                found.as_strided(size, stride, first).copy_(part.target)
        return found.view(torch.uint8)


def _check(model: object, recipe: Recipe) -> None:
    """Raise UnreadableError if parameters do not hold exactly what was copied into them."""
    if recipe.whole:
        raise UnreadableError(
            f"{recipe.whole[0][0]} is loaded by the model's own loader, not copied, and cannot be read back"
        )
    if not recipe.valid(model):
        raise UnreadableError("the parameters are elsewhere than when the recipe was recorded")
    for name, copies in recipe.copies.items():
        dtype = recipe.specs[name].dtype
        for copy in copies:
            if copy.target.dtype != dtype and (dtype, copy.target.dtype) not in _EXACT:
                raise UnreadableError(
                    f"{name} came as {dtype_name(dtype)} and is kept as {dtype_name(copy.target.dtype)}, "
                    "which cannot hold the same values"
                )


def _regions(spec: TensorSpec, copies: Sequence[RegionCopy]) -> list[Box]:
    boxes = {copy.box for copy in copies}
    regions = disjoint(boxes)
    if sum(box.size for box in regions) != sum(box.size for box in boxes):
        raise UnreadableError(f"{spec.name} was copied by regions that overlap, and cannot be read back")
    return regions
