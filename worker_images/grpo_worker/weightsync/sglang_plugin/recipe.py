"""Recipe: which regions of each Hugging Face tensor an engine rank keeps, and where it copies them.

It is recorded once, before the engine serves: the model loads tensors of a pattern from local memory, so no
byte has to be sent to learn what a rank keeps.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from grpo_worker.weightsync.planner.boxes import disjoint, tensor_of
from grpo_worker.weightsync.planner.regions import Box
from grpo_worker.weightsync.protocol.buffers import dtype_name
from grpo_worker.weightsync.sglang_plugin.copy_plan import by_module, storages
from grpo_worker.weightsync.sglang_plugin.load_tracer import Copy, trace_load
from grpo_worker.weightsync.sglang_plugin.post_load import Call, PostLoad

_SHIFT = 64  # bytes by which the patterns of consecutive tensors differ, so that mixed-up ones are noticed
_SHIFTS = 61
# Bytes of the pattern: as fp32, bf16 and e4m3 they are positive numbers up to about 2.
_LOWEST, _HIGHEST = 0x31, 0x3F


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that the trainers send."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class RegionCopy:
    """A copy of region ``box`` of a tensor into ``target``, a view of a parameter.

    ``rows``, ``columns``: dimension of ``target`` for each; None if the region is one row or one column.
    """

    target: torch.Tensor = field(repr=False)
    box: Box
    rows: int | None
    columns: int | None

    def part(self, box: Box) -> "RegionCopy | None":
        """Return the copy of the part of the region that is inside of ``box``, or None."""
        common = self.box.intersection(box)
        if common is None:
            return None
        target = self.target
        if self.rows is not None:
            target = target.narrow(self.rows, common.top - self.box.top, common.bottom - common.top)
        if self.columns is not None:
            target = target.narrow(self.columns, common.left - self.box.left, common.right - common.left)
        return RegionCopy(target, common, self.rows, self.columns)

    def place_in(self, box: Box, pitch: int) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """Return where the region is in the elements of ``box``: first element, size and stride of its view.

        ``pitch``: elements from one row of ``box`` to the next.
        """
        first = (self.box.top - box.top) * pitch + self.box.left - box.left
        stride = list(torch.empty(self.target.shape, device="meta").stride())
        if self.rows is not None:
            stride[self.rows] = pitch
        if self.columns is not None:
            stride[self.columns] = 1
        return first, tuple(self.target.shape), tuple(stride)


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that a rank needs to write tensors into its model.

    ``copies``: of each tensor whose load is only copies of regions.
    ``whole``: tensors that the model's own loader loads, in the groups in which it loads them together.
    ``post_load``: what the model computes after all tensors.
    ``storages``: addresses of the parameters' storages; the recipe is valid as long as they stay.
    """

    specs: Mapping[str, TensorSpec]
    copies: Mapping[str, Sequence[RegionCopy]]
    whole: Sequence[Sequence[str]]
    post_load: PostLoad
    storages: frozenset[int]

    def valid(self, model: Any) -> bool:
        """Return whether the model's parameters are where they were when the recipe was recorded."""
        return self.storages <= storages((*model.parameters(), *model.buffers()))

    def kept(self) -> dict[str, list[Box]]:
        """Return the regions of each tensor that this rank keeps."""
        kept = {name: disjoint(copy.box for copy in copies) for name, copies in self.copies.items()}
        for name in (name for group in self.whole for name in group):
            spec = self.specs[name]
            kept[name] = [tensor_of(spec.shape, dtype_name(spec.dtype)).box]
        return kept


def union_of(kept: Sequence[dict[str, list[Box]]]) -> dict[str, list[Box]]:
    """Return the regions that at least one of several models keeps; kept[m]: of model m."""
    names = {name for of_model in kept for name in of_model}
    return {name: disjoint(box for of_model in kept for box in of_model.get(name, ())) for name in names}


def record(model: Any, specs: Sequence[TensorSpec], beat: Callable[[], None] = lambda: None) -> Recipe:
    """Let ``model`` load a pattern for every tensor, and return the recipe. The model's weights are lost.

    ``beat``: called after each layer, because a large model takes a minute.
    """
    pattern = _pattern(max((spec.nbytes for spec in specs), default=0) + _SHIFT * _SHIFTS)
    calls: list[Call] = []
    copies: dict[str, list[RegionCopy]] = {}
    whole: list[list[str]] = []
    with _recorded_post_load(model, calls):
        for group in _layers(specs):
            of_group, left_out = _record_group(model, group, pattern)
            copies |= of_group
            whole += left_out
            beat()
    targets = (copy.target for of_tensor in copies.values() for copy in of_tensor)
    named = {spec.name: spec for spec in specs}
    return Recipe(named, copies, whole, PostLoad(model, calls), storages(targets))


def _record_group(
    model: Any, specs: Sequence[TensorSpec], pattern: torch.Tensor
) -> tuple[dict[str, list[RegionCopy]], list[list[str]]]:
    """Return the copies of each tensor, and the groups that the model's own loader must load."""
    views = {spec.name: _view(pattern, spec, number) for number, spec in enumerate(specs)}
    trace = trace_load(model.load_weights, list(views.items()))
    shapes = {spec.name: spec.shape for spec in specs}
    found = {
        name: [region_copy(copy, views[name], shapes[name]) for copy in of_tensor]
        for name, of_tensor in trace.copies.items()
    }
    difficult = set(trace.unexplained) | {name for name, of_tensor in found.items() if None in of_tensor}
    whole = [names for names in by_module(shapes) if difficult & set(names)]
    left_out = {name for names in whole for name in names}
    copies = {
        name: [copy for copy in of_tensor if copy is not None]
        for name, of_tensor in found.items()
        if name not in left_out
    }
    return copies, whole


def region_copy(copy: Copy, tensor: torch.Tensor, shape: Sequence[int]) -> RegionCopy | None:
    """Return a copy as one of a region of ``tensor``, or None if it does not read a region row by row.

    ``shape``: of the tensor, whose elements are contiguous.
    """
    width = math.prod(shape[1:])
    offset = int(copy.source.storage_offset()) - int(tensor.storage_offset())
    top, left = divmod(offset, width)
    bottom, right, rows, columns = top + 1, left + 1, None, None
    for dim, (size, stride) in enumerate(zip(copy.source.shape, copy.source.stride(), strict=True)):
        if size == 1:
            continue
        if stride == width and rows is None:
            bottom, rows = top + size, dim
        elif stride == 1 and columns is None and left + size <= width:
            right, columns = left + size, dim
        else:
            return None
    return RegionCopy(copy.target, Box(top, bottom, left, right), rows, columns)


def _pattern(nbytes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(_LOWEST, _HIGHEST + 1, (nbytes,), dtype=torch.uint8, generator=generator)


def _view(pattern: torch.Tensor, spec: TensorSpec, number: int) -> torch.Tensor:
    """Return a tensor of the pattern's bytes; tensors share them, so the memory is that of the largest."""
    start = number % _SHIFTS * _SHIFT
    return pattern[start : start + spec.nbytes].view(spec.dtype).view(spec.shape)


def _layers(specs: Iterable[TensorSpec]) -> list[list[TensorSpec]]:
    """Group the tensors by layer, so that an error in one leaves the others to copies."""
    layers: dict[str, list[TensorSpec]] = {}
    for spec in specs:
        layers.setdefault(".".join(spec.name.split(".")[:3]), []).append(spec)
    return list(layers.values())


@contextmanager
def _recorded_post_load(model: Any, calls: list[Call]) -> Iterator[None]:
    """Add each call of the model's ``post_load_weights`` to ``calls``, once."""
    original = getattr(model, "post_load_weights", None)
    if original is None:
        yield
        return

    def recorded(*args: Any, **kwargs: Any) -> Any:
        call = args, {name: _reusable(value) for name, value in kwargs.items()}
        if call not in calls:
            calls.append(call)
        return original(*args, **call[1])

    model.post_load_weights = recorded
    try:
        yield
    finally:
        del model.post_load_weights


def _reusable(value: Any) -> Any:
    return list(value) if isinstance(value, Iterator) else value
