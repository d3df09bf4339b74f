"""Region loader: writes regions of tensors from a buffer into a model, by a recorded recipe."""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from grpo_worker.weightsync.planner.regions import Box
from grpo_worker.weightsync.sglang_plugin.copy_plan import CopyPlan, Step
from grpo_worker.weightsync.sglang_plugin.recipe import Recipe, RegionCopy
from grpo_worker.weightsync.sglang_plugin.second_copy import SecondCopy
from grpo_worker.weightsync.sglang_plugin.staged_receiver import DirectLoadError


@dataclass(frozen=True, slots=True)
class Placed:
    """Region of a tensor in a buffer. ``start``: byte of its first row. ``pitch``: elements between rows."""

    name: str
    box: Box
    start: int
    pitch: int


@dataclass(frozen=True, slots=True)
class _Program:
    """``whole``: regions of tensors that the model's own loader loads."""

    copies: CopyPlan
    whole: tuple[Placed, ...]


class RegionLoader:
    """Writes regions into ``model``.

    ``second``: they are written into this copy of the model, which must be installed before ``finish``.
    """

    def __init__(self, model: Any, recipe: Recipe, second: SecondCopy | None = None) -> None:
        self._model = model
        self._recipe = recipe
        self._second = second
        self._programs: dict[Hashable, _Program] = {}
        self._whole: dict[str, torch.Tensor] = {}
        self._by_loader = {name for group in recipe.whole for name in group}

    def start(self) -> None:
        """Begin a version. Raises DirectLoadError like ``check``."""
        self.check()
        self._whole = {}

    def write(self, key: Hashable, regions: Callable[[], Iterable[Placed]], buffer: torch.Tensor) -> int:
        """Write the regions in ``buffer`` (uint8 [bytes]); equal keys stand for equal regions.

        ``regions``: asked for once for each key. Returns the number of copies.
        """
        self.prepare(key, regions)
        program = self._programs[key]
        program.copies.replay(buffer)
        for part in program.whole:
            self._keep(part, buffer)
        return len(program.copies.steps)

    def prepare(self, key: Hashable, regions: Callable[[], Iterable[Placed]]) -> None:
        """List the copies of regions, which ``write`` repeats for each version."""
        if key not in self._programs:
            self._programs[key] = self._program(regions())

    def finish(self) -> None:
        """Load the tensors that are not only copied, and repeat the model's processing after a load."""
        for group in self._recipe.whole:
            tensors = [(name, self._whole[name]) for name in group if name in self._whole]
            if tensors:
                self._model.load_weights(tensors)
        self._whole = {}
        self._recipe.post_load.run()

    def check(self) -> None:
        """Raise DirectLoadError if parameters have moved since the recording."""
        if not self._recipe.valid(self._model):
            raise DirectLoadError("the parameters are elsewhere than when the recipe was recorded")

    def _program(self, regions: Iterable[Placed]) -> _Program:
        steps: list[Step] = []
        whole: list[Placed] = []
        for placed in regions:
            if placed.name in self._by_loader:
                whole.append(placed)
            else:
                steps += self._steps(placed)
        copies = CopyPlan.of(steps)
        return _Program(copies.into(self._second.view) if self._second else copies, tuple(whole))

    def _steps(self, placed: Placed) -> Iterable[Step]:
        for copy in self._recipe.copies.get(placed.name, ()):
            part = copy.part(placed.box)
            if part is not None:
                yield _step(part, placed, self._recipe.specs[placed.name].dtype)

    def _keep(self, part: Placed, buffer: torch.Tensor) -> None:
        """Copy a region into the whole tensor that the model's own loader gets at the end."""
        spec, box = self._recipe.specs[part.name], part.box
        if part.name not in self._whole:
            self._whole[part.name] = torch.empty(spec.shape, dtype=spec.dtype, device=buffer.device)
        rows, columns = box.bottom - box.top, box.right - box.left
        elements = (rows - 1) * part.pitch + columns
        source = buffer[part.start : part.start + elements * spec.dtype.itemsize].view(spec.dtype)
        whole = self._whole[part.name].view(spec.shape[0] if spec.shape else 1, -1)
        target = whole[box.top : box.bottom, box.left : box.right]
        target.copy_(source.as_strided((rows, columns), (part.pitch, 1)))


def _step(copy: RegionCopy, placed: Placed, dtype: torch.dtype) -> Step:
    first, size, stride = copy.place_in(placed.box, placed.pitch)
    return Step(copy.target, dtype, placed.start + first * dtype.itemsize, size, stride)
