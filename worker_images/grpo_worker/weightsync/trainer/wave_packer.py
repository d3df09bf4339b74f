"""Wave packer: writes a trainer rank's regions into the messages of a wave, and quantizes those in FP8."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from grpo_worker.common.device_numbers import DeviceNumbers, Numbers
from grpo_worker.quantization.fp8 import FP8_BLOCK, Part, quantise, quantise_into
from grpo_worker.weightsync.planner.boxes import tensor_of
from grpo_worker.weightsync.planner.regions import Box
from grpo_worker.weightsync.protocol import byte_copies
from grpo_worker.weightsync.protocol.buffers import copy_all, dtype_name
from grpo_worker.weightsync.protocol.byte_copies import ByteCopies, Piece

if TYPE_CHECKING:  # it needs Triton
    from grpo_worker.quantization.fp8_triton import BlockQuantiser

_ALIGNED = 16  # bytes; what the kernels move at once divides them
_NONE = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Target:
    """Views of a message into which a region is packed: for its values and, in FP8, its scales."""

    name: str
    box: Box
    values: torch.Tensor
    scales: torch.Tensor | None


class Shards:
    """A rank's shards, of which regions are read. ``parts``: those of each tensor."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts: dict[str, list[Part]] = {}
        for part in parts:
            self.parts.setdefault(part[0], []).append(part)
        self._shards: dict[str, list[Shard]] = {}

    def region(self, name: str, box: Box) -> torch.Tensor:
        """Return the values of a region, [rows, columns]. Raises KeyError if the rank does not hold it."""
        _, shard = self.holding(name, box)
        if shard.box == box:
            return shard.values
        size = box.bottom - box.top, box.right - box.left
        first = shard.values.storage_offset() + shard.before(box)
        return shard.values.as_strided(size, shard.values.stride(), first)

    def holding(self, name: str, box: Box) -> "tuple[int, Shard]":
        """Return the shard that contains a region, and its number among those of the tensor.

        Raises KeyError if the rank does not hold the region.
        """
        for number, shard in enumerate(self.of(name)):
            if shard.box.contains(box):
                return number, shard
        raise KeyError(f"{name}: this rank does not hold {box}")

    def of(self, name: str) -> "list[Shard]":
        """Return the shards of a tensor. Each is looked at when it is packed, while earlier ones travel."""
        if name not in self._shards:
            self._shards[name] = [Shard.of(part) for part in self.parts.get(name, ())]
        return self._shards[name]


@dataclass(frozen=True, slots=True)
class Shard:
    """Values [rows, columns], with contiguous rows, of the region ``box``."""

    box: Box
    values: torch.Tensor

    @classmethod
    def of(cls, part: Part) -> "Shard":
        """Return the shard of a part, with a copy of values whose rows are not contiguous."""
        _, shape, dim, offset, tensor = part
        values = tensor.detach().reshape(tensor.shape[0] if tensor.dim() else 1, -1)
        if values.stride(1) != 1:
            values = values.contiguous()
        return cls(_box(tuple(shape), dim, offset, tuple(values.shape), tensor.dtype), values)

    def before(self, box: Box) -> int:
        """Return the elements in memory before a region of this shard."""
        return (box.top - self.box.top) * self.values.stride(0) + box.left - self.box.left


@lru_cache(1 << 16)
def _box(shape: tuple[int, ...], dim: int, offset: int, size: tuple[int, int], dtype: torch.dtype) -> Box:
    """Return the region of a tensor of ``shape`` that a shard of ``size`` holds; see Part."""
    whole = tensor_of(shape, dtype_name(dtype))
    top, left = (offset, 0) if dim == 0 else (0, offset * whole.columns // shape[1])
    return Box(top, top + size[0], left, left + size[1])


class WavePacker(Protocol):
    """Packs the regions of one wave."""

    def pack(self, shards: Shards) -> None:
        """Write each region into its views."""
        ...


def packer(targets: Sequence[Target], numbers: DeviceNumbers) -> WavePacker:
    """Return what packs ``targets``, which are in the memory of the device of ``numbers``.

    ``numbers``: [targets], for the addresses of the regions.
    """
    if numbers.on_device.is_cuda:
        return KernelPacker(targets, numbers)
    return TensorPacker(targets)


class TensorPacker:
    """Packs with torch's own calls."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self._plain = [target for target in targets if target.scales is None]
        self._scaled = [(target, target.scales) for target in targets if target.scales is not None]

    def pack(self, shards: Shards) -> None:
        """Write each region into its views."""
        regions = [shards.region(target.name, target.box) for target in self._plain]
        copy_all([target.values for target in self._plain], regions)
        quantise_into([(shards.region(t.name, t.box), t.values, scales) for t, scales in self._scaled])


class KernelPacker:
    """Packs with a few kernels on a GPU.

    They are listed for the first version. Later ones only change the addresses of shards that have moved:
    with some calls of torch for each region, packing would take longer than sending.
    """

    def __init__(self, targets: Sequence[Target], numbers: DeviceNumbers) -> None:
        self._targets = targets
        self._numbers = numbers
        self._sources: _Sources | None = None  # of the first version on
        self._bases = _NONE
        self._copies, self._copied = ByteCopies((), numbers.on_device.device), _NONE
        self._quantised: list[tuple[BlockQuantiser, Numbers]] = []  # each with the numbers of its targets

    def pack(self, shards: Shards) -> None:
        """Write each region into its views. Raises ValueError for values of another dtype than planned."""
        bases = None if self._sources is None else self._sources.find(shards)
        if self._sources is None or bases is None:
            self._sources = _Sources(self._targets, shards)
            self._list(self._sources.places)
            self._bases = _NONE
            bases = self._sources.addresses_of(shards)
        if not np.array_equal(bases, self._bases):
            self._move(bases, self._sources.regions(bases))
        self._copies.launch()
        for quantiser, _ in self._quantised:
            quantiser.launch(FP8_BLOCK)

    def _list(self, places: "Sequence[_Place]") -> None:
        """List copies and quantizations, whose sources begin at 0."""
        from grpo_worker.quantization.fp8_triton import BlockQuantiser, MatrixKind

        copied: list[int] = []
        pieces: list[Piece] = []
        quantised: dict[MatrixKind, list[int]] = {}
        for number, (target, place) in enumerate(zip(self._targets, places, strict=True)):
            values = target.values
            if target.scales is not None:
                shape, ends = (values.shape[0], values.shape[1]), (place.before, values.data_ptr())
                kind = MatrixKind.of(place.dtype, shape, place.pitch, *ends)
                quantised.setdefault(kind, []).append(number)
            elif place.dtype == values.dtype:
                copied.append(number)
                pieces.append(_piece(values, place))
            else:
                raise ValueError(f"{target.name}: it is {place.dtype}, but {values.dtype} is planned")
        on_device = self._numbers.on_device
        self._copies, self._copied = ByteCopies(pieces, on_device.device), np.array(copied, dtype=np.int64)
        start, self._quantised = self._copies.count, []
        self._copies.read_sources(on_device[:start])
        for kind, chosen in quantised.items():
            sources = on_device[start : start + len(chosen)]
            start += len(chosen)
            quantiser = BlockQuantiser(kind, sources, *self._ends(chosen))
            self._quantised.append((quantiser, np.array(chosen, dtype=np.int64)))

    def _ends(self, numbers: Sequence[int]) -> tuple[Numbers, Numbers]:
        """Return the addresses of quotients and scales."""
        targets = [self._targets[number] for number in numbers]
        scales = [target.scales.data_ptr() for target in targets if target.scales is not None]
        outs = [target.values.data_ptr() for target in targets]
        return np.array(outs, dtype=np.int64), np.array(scales, dtype=np.int64)

    def _move(self, bases: Numbers, addresses: Numbers) -> None:
        self._bases = bases
        of_copies = self._copies.sources_of(addresses[self._copied])
        self._numbers.replace(np.concatenate([of_copies, *(addresses[n] for _, n in self._quantised)]))


@dataclass(frozen=True, slots=True)
class _Place:
    """Values of a region. ``before``: bytes before them in the shard, and its address modulo 16.

    ``pitch``: elements from the beginning of a row to that of the next one.
    """

    before: int
    pitch: int
    dtype: torch.dtype


class _Sources:
    """Places of the regions of ``targets``, which stay as they are while shards of the same layout move."""

    def __init__(self, targets: Sequence[Target], shards: Shards) -> None:
        self.places: list[_Place] = []
        self._parts: dict[tuple[str, int], int] = {}  # name and number of a part -> place in a list of parts
        of_target, before = [], []
        for target in targets:
            number, shard = shards.holding(target.name, target.box)
            of_target.append(self._parts.setdefault((target.name, number), len(self._parts)))
            before.append(shard.before(target.box) * shard.values.itemsize)
            start = shard.values.data_ptr() % _ALIGNED + before[-1]
            self.places.append(_Place(start, shard.values.stride(0), shard.values.dtype))
        self._of_target, self._before = np.array(of_target, dtype=np.int64), np.array(before, dtype=np.int64)
        self._layouts = [_layout(shards.parts[name][number]) for name, number in self._parts]
        self._alignment = self.addresses_of(shards) % _ALIGNED

    def find(self, shards: Shards) -> Numbers | None:
        """Return the addresses of the parts if these shards have the same layout and alignment, or None.

        It is called for each wave, and takes as long as it is sent if it does more for each part.
        """
        try:
            if [_layout(shards.parts[name][number]) for name, number in self._parts] != self._layouts:
                return None
        except (KeyError, IndexError):
            return None
        found = self.addresses_of(shards)
        return found if np.array_equal(found % _ALIGNED, self._alignment) else None

    def addresses_of(self, shards: Shards) -> Numbers:
        """Return the addresses of the parts: int64 [parts]."""
        found = []
        for name, number in self._parts:
            tensor = shards.parts[name][number][-1]
            if not tensor.is_contiguous():  # rows may have been copied
                tensor = shards.of(name)[number].values
            found.append(tensor.data_ptr())
        return np.array(found, dtype=np.int64)

    def regions(self, addresses: Numbers) -> Numbers:
        """Return the addresses of the regions, int64 [targets], from those of the parts."""
        return addresses[self._of_target] + self._before


def _layout(part: Part) -> tuple[object, ...]:
    _, shape, dim, offset, tensor = part
    stride = None if tensor.is_contiguous() else tensor.stride()  # of contiguous ones the shape says it
    return shape, dim, offset, tensor.shape, stride, tensor.dtype


def _piece(values: torch.Tensor, place: _Place) -> Piece:
    """Return the copy of ``place`` into ``values``, which are contiguous."""
    rows, columns = values.shape
    size = values.itemsize
    if place.pitch == columns:
        return Piece(place.before, values.data_ptr(), 1, rows * columns * size, 0, 0)
    return Piece(place.before, values.data_ptr(), rows, columns * size, place.pitch * size, columns * size)


def compile_for(device: torch.device, fp8: bool) -> None:
    """Compile the kernels for a GPU, so that the first version does not wait for the compiler."""
    byte_copies.compile_for(device)
    if fp8 and device.type == "cuda":
        quantise(torch.zeros(FP8_BLOCK, FP8_BLOCK, dtype=torch.bfloat16, device=device))
