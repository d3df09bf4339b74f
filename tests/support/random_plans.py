"""Random tensors, cut in one way on trainer ranks and in another on the ranks of an engine."""

import random
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from grpo_worker.quantization.fp8 import Part, quantise
from grpo_worker.weightsync.planner.regions import BLOCK, FP8, Box, scale_box
from grpo_worker.weightsync.protocol.manifest import Slice
from grpo_worker.weightsync.sglang_plugin.recipe import TensorSpec

KINDS = ("bfloat16", "float32", FP8)


@dataclass(frozen=True, slots=True)
class Case:
    """Slices (tensor, dim, offset, length) that trainer ranks hold, and boxes that engine ranks keep.

    ``shapes``: shape and dtype of each tensor as it is sent.
    """

    shapes: dict[str, tuple[tuple[int, int], str]]
    held: list[list[tuple[str, int, int, int]]]
    kept: list[list[tuple[str, Box]]]
    seed: int

    def values(self, version: int) -> dict[str, torch.Tensor]:
        """Return the trainers' weights of a version."""
        generator = torch.Generator().manual_seed(1000 * self.seed + version)
        result = {}
        for name, (shape, kind) in self.shapes.items():
            values = torch.randn(shape, generator=generator)
            result[name] = values if kind == "float32" else values.bfloat16()
        return result

    def sent(self, version: int) -> dict[str, torch.Tensor]:
        """Return the tensors of a version as engines load them."""
        result = {}
        for name, values in self.values(version).items():
            if self.shapes[name][1] == FP8:
                result[name], result[f"{name}_scale_inv"] = quantise(values)
            else:
                result[name] = values
        return result

    def parts(self, rank: int, version: int) -> list[Part]:
        """Return the shards of a trainer rank."""
        values = self.values(version)
        return [
            (
                name,
                tuple(values[name].shape),
                dim,
                offset,
                values[name].narrow(dim, offset, length).contiguous(),
            )
            for name, dim, offset, length in self.held[rank]
        ]

    def slices(self, rank: int) -> list[Slice]:
        """Return the layout of a trainer rank."""
        return [
            Slice(name, self.shapes[name][0], self.shapes[name][1], dim, offset, length, 0, 0)
            for name, dim, offset, length in self.held[rank]
        ]

    def specs(self) -> list[TensorSpec]:
        """Return the tensors as they are sent."""
        return [TensorSpec(n, tuple(t.shape), t.dtype) for n, t in self.sent(0).items()]


def draw(seed: int, trainers: int, engine_ranks: int, fp8: bool = True) -> Case:
    """Draw a case. Shards of tensors in FP8 are cut at blocks."""
    rng = random.Random(seed)
    shapes: dict[str, tuple[tuple[int, int], str]] = {}
    held: list[list[tuple[str, int, int, int]]] = [[] for _ in range(trainers)]
    kept: list[list[tuple[str, Box]]] = [[] for _ in range(engine_ranks)]
    for number in range(rng.randint(1, 6)):
        kind = rng.choice(KINDS if fp8 else KINDS[:2])
        name = f"model.layers.{number % 3}.m{number}.weight"
        unit = BLOCK if kind == FP8 else rng.choice([1, 3, 16])
        shape = (unit * rng.randint(1, 6), unit * rng.randint(1, 4))
        shapes[name] = shape, kind
        dim = rng.randint(0, 1)
        for start, end in _cuts(rng, shape[dim], unit):
            for rank in rng.sample(range(trainers), rng.randint(1, trainers)):
                held[rank].append((name, dim, start, end - start))
        for boxes in kept:
            dim = rng.randint(0, 1)
            for start, end in _cuts(rng, shape[dim], unit):
                if rng.random() < 0.6:
                    box = Box(start, end, 0, shape[1]) if dim == 0 else Box(0, shape[0], start, end)
                    boxes.append((name, box))
    return Case(shapes, held, kept, seed)


def _cuts(rng: random.Random, size: int, unit: int) -> list[tuple[int, int]]:
    inner = rng.sample(range(unit, size, unit), min(rng.randint(0, 2), len(range(unit, size, unit))))
    edges = [0, *sorted(inner), size]
    return list(pairwise(edges))


class EngineModel(nn.Module):
    """Model of an engine rank: a parameter for each region that it keeps, and one that it computes.

    A region of a wide tensor is kept transposed, so that it is no plain copy of rows.
    """

    def __init__(self, case: Case, rank: int) -> None:
        super().__init__()
        self._boxes: dict[str, list[tuple[str, Box]]] = {}
        self.finished = 0
        for number, (name, box) in enumerate(case.kept[rank]):
            self._keep(f"p{number}", name, box, dtype_of_case(case, name))
            if case.shapes[name][1] == FP8:
                self._keep(f"s{number}", f"{name}_scale_inv", scale_box(box), torch.float32)

    def _keep(self, parameter: str, name: str, box: Box, dtype: torch.dtype) -> None:
        self._boxes.setdefault(name, []).append((parameter, box))
        shape = (box.bottom - box.top, box.right - box.left)
        shape = shape[::-1] if self._transposed(shape) else shape
        self.register_parameter(parameter, nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False))

    @staticmethod
    def _transposed(shape: tuple[int, int]) -> bool:
        return shape[0] % 5 == 0

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            for parameter, box in self._boxes.get(name, ()):
                part = tensor[box.top : box.bottom, box.left : box.right]
                target = self.get_parameter(parameter)
                if self._transposed((box.bottom - box.top, box.right - box.left)):
                    part = part.t()
                if tensor.dtype == torch.float32 and box.top == 3:
                    part = part * 2  # computed, not copied
                target.data.copy_(part)
        self.post_load_weights()

    def post_load_weights(self) -> None:
        self.finished += 1


def dtype_of_case(case: Case, name: str) -> torch.dtype:
    return next(spec.dtype for spec in case.specs() if spec.name == name)


def differences(case: Case, rank: int, model: EngineModel, version: int) -> list[str]:
    """Return the parameters that differ from those of a model that loaded the whole version by itself."""
    expected = EngineModel(case, rank)
    expected.load_weights(case.sent(version).items())
    theirs: dict[str, Any] = expected.state_dict()
    return [
        name
        for name, value in model.state_dict().items()
        if not torch.equal(value.view(torch.uint8), theirs[name].view(torch.uint8))
    ]
