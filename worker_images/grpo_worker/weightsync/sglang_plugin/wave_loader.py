"""Wave loader: writes the messages of each wave into the model by a recorded recipe."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from grpo_worker.weightsync.planner.boxes import SCALES
from grpo_worker.weightsync.planner.engine_plan import Part
from grpo_worker.weightsync.planner.regions import Box, scale_box
from grpo_worker.weightsync.planner.schedule import Message, places
from grpo_worker.weightsync.sglang_plugin.recipe import Recipe
from grpo_worker.weightsync.sglang_plugin.region_loader import Placed, RegionLoader
from grpo_worker.weightsync.sglang_plugin.second_copy import SecondCopy

Arrival = tuple[Message, int]  # a message, and the byte of the buffer at which it begins


class WaveLoader:
    """Writes one plan's messages into ``model``. ``part``: what this rank receives.

    ``second``: they are written into this copy of the model, which must be installed before ``finish``.
    """

    def __init__(self, model: Any, recipe: Recipe, part: Part, second: SecondCopy | None = None) -> None:
        self._loader = RegionLoader(model, recipe, second)
        self._part = part
        self.start, self.finish, self.check = self._loader.start, self._loader.finish, self._loader.check

    def write(self, number: int, arrivals: Sequence[Arrival], buffer: torch.Tensor) -> None:
        """Write the messages in ``buffer`` (uint8 [bytes]); equal numbers stand for equal arrivals."""
        self._loader.write(number, lambda: self._placed(arrivals), buffer)

    def prepare(self, number: int, arrivals: Sequence[Arrival]) -> None:
        """List the copies of messages, which ``write`` repeats for each version."""
        self._loader.prepare(number, lambda: self._placed(arrivals))

    def _placed(self, arrivals: Sequence[Arrival]) -> Iterator[Placed]:
        for message, offset in arrivals:
            of_regions, _ = places(message.regions, self._part.tensors)
            for region, place in zip(message.regions, of_regions, strict=True):
                yield _rows(region.tensor, region.box, offset + place.values[0])
                if place.scales:
                    yield _rows(region.tensor + SCALES, scale_box(region.box), offset + place.scales[0])


def _rows(name: str, box: Box, start: int) -> Placed:
    return Placed(name, box, start, box.right - box.left)
