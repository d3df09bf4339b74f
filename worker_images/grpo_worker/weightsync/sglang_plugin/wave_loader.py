"""Wave loader: writes the messages of each wave into the model by a recorded recipe."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from grpo_worker.weightsync.planner.boxes import SCALES
from grpo_worker.weightsync.planner.engine_plan import Part
from grpo_worker.weightsync.planner.regions import Box, scale_box
from grpo_worker.weightsync.planner.schedule import Message, places
from grpo_worker.weightsync.sglang_plugin.copy_plan import CopyPlan, Step
from grpo_worker.weightsync.sglang_plugin.recipe import Recipe, RegionCopy
from grpo_worker.weightsync.sglang_plugin.second_copy import SecondCopy
from grpo_worker.weightsync.sglang_plugin.staged_receiver import DirectLoadError

Arrival = tuple[Message, int]  # a message, and the byte of the buffer at which it begins


@dataclass(frozen=True, slots=True)
class _WholePart:
    """Region of a tensor that the model's own loader loads; ``start``: byte in the buffer."""

    name: str
    box: Box
    start: int


@dataclass(frozen=True, slots=True)
class _Program:
    copies: CopyPlan
    whole: tuple[_WholePart, ...]


class WaveLoader:
    """Writes one plan's messages into ``model``. ``part``: what this rank receives.

    ``second``: they are written into this copy of the model, which must be installed before ``finish``.
    """

    def __init__(self, model: Any, recipe: Recipe, part: Part, second: SecondCopy | None = None) -> None:
        self._model = model
        self._recipe = recipe
        self._part = part
        self._second = second
        self._programs: dict[int, _Program] = {}  # by number of the arrivals
        self._whole: dict[str, torch.Tensor] = {}
        self._by_loader = {name for group in recipe.whole for name in group}

    def start(self) -> None:
        """Begin a version. Raises DirectLoadError like ``check``."""
        self.check()
        self._whole = {}

    def write(self, number: int, arrivals: Sequence[Arrival], buffer: torch.Tensor) -> None:
        """Write the messages in ``buffer`` (uint8 [bytes]); equal numbers stand for equal arrivals."""
        self.prepare(number, arrivals)
        program = self._programs[number]
        program.copies.replay(buffer)
        for part in program.whole:
            self._keep(part, buffer)

    def prepare(self, number: int, arrivals: Sequence[Arrival]) -> None:
        """List the copies of messages, which ``write`` repeats for each version."""
        if number not in self._programs:
            self._programs[number] = self._program(arrivals)

    def finish(self) -> None:
        """Load the tensors that are not only copied, and repeat the model's processing after a load."""
        for group in self._recipe.whole:
            tensors = [(name, self._whole[name]) for name in group if name in self._whole]
            if tensors:
                self._model.load_weights(tensors)
        self._whole = {}
        for args, kwargs in self._recipe.post_load:
            self._model.post_load_weights(*args, **kwargs)

    def check(self) -> None:
        """Raise DirectLoadError if parameters have moved since the recording."""
        if not self._recipe.valid(self._model):
            raise DirectLoadError("the parameters are elsewhere than when the recipe was recorded")

    def _program(self, arrivals: Sequence[Arrival]) -> _Program:
        steps: list[Step] = []
        whole: list[_WholePart] = []
        for message, offset in arrivals:
            of_regions, _ = places(message.regions, self._part.tensors)
            for region, place in zip(message.regions, of_regions, strict=True):
                self._add(region.tensor, region.box, offset + place.values[0], steps, whole)
                if place.scales:
                    name = region.tensor + SCALES
                    self._add(name, scale_box(region.box), offset + place.scales[0], steps, whole)
        copies = CopyPlan.of(steps)
        return _Program(copies.into(self._second.view) if self._second else copies, tuple(whole))

    def _add(self, name: str, box: Box, start: int, steps: list[Step], whole: list[_WholePart]) -> None:
        if name in self._by_loader:
            whole.append(_WholePart(name, box, start))
            return
        dtype = self._recipe.specs[name].dtype
        for copy in self._recipe.copies.get(name, ()):
            part = copy.part(box)
            if part is not None:
                steps.append(_step(part, box, start, dtype))

    def _keep(self, part: _WholePart, buffer: torch.Tensor) -> None:
        """Copy a region into the whole tensor that the model's own loader gets at the end."""
        spec = self._recipe.specs[part.name]
        if part.name not in self._whole:
            self._whole[part.name] = torch.empty(spec.shape, dtype=spec.dtype, device=buffer.device)
        rows, columns = part.box.bottom - part.box.top, part.box.right - part.box.left
        source = buffer[part.start : part.start + rows * columns * spec.dtype.itemsize].view(spec.dtype)
        whole = self._whole[part.name].view(spec.shape[0] if spec.shape else 1, -1)
        target = whole[part.box.top : part.box.bottom, part.box.left : part.box.right]
        target.copy_(source.view(rows, columns))


def _step(copy: RegionCopy, box: Box, start: int, dtype: torch.dtype) -> Step:
    """Return the copy from the region ``box``, whose rows are at byte ``start`` of the buffer."""
    width = box.right - box.left
    first = (copy.box.top - box.top) * width + copy.box.left - box.left
    stride = list(torch.empty(copy.target.shape, device="meta").stride())
    if copy.rows is not None:
        stride[copy.rows] = width
    if copy.columns is not None:
        stride[copy.columns] = 1
    return Step(copy.target, dtype, start + first * dtype.itemsize, tuple(copy.target.shape), tuple(stride))
