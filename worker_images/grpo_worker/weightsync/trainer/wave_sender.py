"""Wave sender: packs a trainer rank's regions into messages and sends them wave by wave."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from grpo_worker.profiling.progress import PROGRESS
from grpo_worker.quantization.fp8 import Part, quantise_into
from grpo_worker.weightsync.planner.boxes import tensor_of
from grpo_worker.weightsync.planner.engine_plan import Part as PlanPart
from grpo_worker.weightsync.planner.regions import Box, scale_box
from grpo_worker.weightsync.planner.schedule import CHECK_BYTES, Message, places
from grpo_worker.weightsync.protocol.buffers import aligned, copy_all, dtype_name, dtype_of
from grpo_worker.weightsync.protocol.fingerprint import compile_for, fingerprint
from grpo_worker.weightsync.transport.rendezvous import Transfer, TransferGroup

_BUFFERS = 2  # one wave is packed while the other is sent


@dataclass(frozen=True, slots=True)
class _Target:
    """Views of a message into which a region is packed: for its values and, in FP8, its scales."""

    name: str
    box: Box
    values: torch.Tensor
    scales: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Packed:
    """A message's bytes with the fingerprint at their end, and what is packed into them.

    ``gaps``: between the regions; they are zero, because receivers add up all bytes.
    """

    landing: int
    data: torch.Tensor
    targets: tuple[_Target, ...]
    gaps: tuple[torch.Tensor, ...]


class WaveSender:
    """Sends a trainer rank's ``part`` of a plan to one engine, whose first rank is ``first`` in the group."""

    def __init__(self, part: PlanPart, group: TransferGroup, first: int, device: torch.device) -> None:
        self._group = group
        self._first = first
        waves = [wave for wave in part.waves if wave]
        size = max((sum(aligned(m.nbytes) for m in wave) for wave in waves), default=0)
        buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(_BUFFERS)]
        self._waves = [_packed(buffers[number % _BUFFERS], wave, part) for number, wave in enumerate(waves)]
        self._compile(device)

    def _compile(self, device: torch.device) -> None:
        """Run the kernels once, so that the first version does not wait for their compiler."""
        compile_for(device)
        targets = (target for wave in self._waves for packed in wave for target in packed.targets)
        first = next((target for target in targets if target.scales is not None), None)
        if first is not None and first.scales is not None:
            zeros = torch.zeros(first.values.shape, dtype=torch.bfloat16, device=first.values.device)
            quantise_into([(zeros, first.values, first.scales)])

    def send(self, shards: "Shards", patience: float) -> None:
        """Send one version. ``patience``: seconds that the rank waits for a wave. Raises TransferError."""
        transfers: list[Transfer] = []
        for number, wave in enumerate(self._waves):
            if number >= _BUFFERS:
                transfers[number - _BUFFERS].wait()  # its buffer is reused now
            shards.pack([target for packed in wave for target in packed.targets])
            if gaps := [gap for packed in wave for gap in packed.gaps]:
                torch._foreach_zero_(gaps)
            for packed in wave:
                payload, check = packed.data[:-CHECK_BYTES], packed.data[-CHECK_BYTES:]
                check.view(torch.int64).copy_(fingerprint(payload).view(1))
            pairs = [(packed.data, self._first + packed.landing) for packed in wave]
            transfers.append(self._group.send(pairs, time.monotonic() + patience))
            PROGRESS.add("waves sent")
        for transfer in transfers[-_BUFFERS:]:
            transfer.wait()


def _packed(buffer: torch.Tensor, wave: Sequence[Message], part: PlanPart) -> list[_Packed]:
    result, start = [], 0
    for message in wave:
        data = buffer[start : start + message.nbytes]
        targets, gaps = tuple(_targets(data, message, part)), tuple(_gaps(data, message, part))
        result.append(_Packed(message.landing, data, targets, gaps))
        start += aligned(message.nbytes)
    return result


def _gaps(data: torch.Tensor, message: Message, part: PlanPart) -> list[torch.Tensor]:
    of_regions, end = places(message.regions, part.tensors)
    used = sorted([place.values for place in of_regions] + [p.scales for p in of_regions if p.scales])
    edges = [*(start for start, _ in used[1:]), end]
    return [data[stop:edge] for (_, stop), edge in zip(used, edges, strict=True) if stop < edge]


def _targets(data: torch.Tensor, message: Message, part: PlanPart) -> list[_Target]:
    of_regions, _ = places(message.regions, part.tensors)
    targets = []
    for region, place in zip(message.regions, of_regions, strict=True):
        dtype = dtype_of(part.tensors[region.tensor].dtype)
        values = _view(data, place.values, dtype, region.box)
        scales = _view(data, place.scales, torch.float32, scale_box(region.box)) if place.scales else None
        targets.append(_Target(region.tensor, region.box, values, scales))
    return targets


def _view(data: torch.Tensor, place: tuple[int, int], dtype: torch.dtype, box: Box) -> torch.Tensor:
    return data[place[0] : place[1]].view(dtype).view(box.bottom - box.top, box.right - box.left)


class Shards:
    """A rank's shards, of which regions are read, and quantized to FP8 while they are packed."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts: dict[str, list[Part]] = {}
        for part in parts:
            self._parts.setdefault(part[0], []).append(part)
        self._shards: dict[str, list[tuple[Box, torch.Tensor]]] = {}

    def pack(self, targets: Sequence[_Target]) -> None:
        """Write each region into its views."""
        plain = [target for target in targets if target.scales is None]
        copy_all([target.values for target in plain], [self._region(t.name, t.box) for t in plain])
        quantise_into(
            [(self._region(t.name, t.box), t.values, t.scales) for t in targets if t.scales is not None]
        )

    def _region(self, name: str, box: Box) -> torch.Tensor:
        for held, values in self._shards_of(name):
            if held == box:
                return values
            if held.contains(box):
                down, across = values.stride()
                before = (box.top - held.top) * down + (box.left - held.left) * across
                size = box.bottom - box.top, box.right - box.left
                # One call of torch for each of thousands of regions.
                return values.as_strided(size, (down, across), values.storage_offset() + before)
        raise KeyError(f"{name}: this rank does not hold {box}")

    def _shards_of(self, name: str) -> list[tuple[Box, torch.Tensor]]:
        """Return the shards of a tensor. Each is looked at when it is packed, while earlier ones travel."""
        if name not in self._shards:
            self._shards[name] = [_shard(part) for part in self._parts.get(name, ())]
        return self._shards[name]


def _shard(part: Part) -> tuple[Box, torch.Tensor]:
    _, shape, dim, offset, tensor = part
    values = tensor.detach().reshape(tensor.shape[0] if tensor.dim() else 1, -1)
    return _box(tuple(shape), dim, offset, tuple(values.shape), tensor.dtype), values


@lru_cache(1 << 16)
def _box(shape: tuple[int, ...], dim: int, offset: int, size: tuple[int, int], dtype: torch.dtype) -> Box:
    """Return the region of a tensor of ``shape`` that a shard of ``size`` holds; see Part."""
    whole = tensor_of(shape, dtype_name(dtype))
    top, left = (offset, 0) if dim == 0 else (0, offset * whole.columns // shape[1])
    return Box(top, top + size[0], left, left + size[1])
