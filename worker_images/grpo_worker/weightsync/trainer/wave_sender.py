"""Wave sender: sends a trainer rank's regions to one engine, wave by wave."""

import time
from dataclasses import dataclass

import torch

from grpo_worker.common.device_numbers import DeviceNumbers
from grpo_worker.profiling.progress import PROGRESS
from grpo_worker.weightsync.planner.engine_plan import SEND_BUFFERS, Part
from grpo_worker.weightsync.planner.regions import Box, scale_box
from grpo_worker.weightsync.planner.schedule import CHECK_BYTES, Message, Wave, places
from grpo_worker.weightsync.protocol import fingerprint
from grpo_worker.weightsync.protocol.buffers import aligned, dtype_of
from grpo_worker.weightsync.trainer import wave_packer
from grpo_worker.weightsync.trainer.wave_packer import Shards, Target, WavePacker
from grpo_worker.weightsync.transport.rendezvous import Transfer, TransferGroup


@dataclass(frozen=True, slots=True)
class _Wave:
    """Messages of a wave, each with the engine rank that receives it, and what packs them.

    ``gaps``: between the regions; they are zero, because receivers add up all bytes.
    """

    messages: tuple[tuple[torch.Tensor, int], ...]
    packer: WavePacker
    gaps: tuple[torch.Tensor, ...]

    def pack(self, shards: Shards) -> None:
        """Write the regions, and each message's fingerprint to its end."""
        self.packer.pack(shards)
        if self.gaps:
            torch._foreach_zero_(list(self.gaps))
        for data, _ in self.messages:
            fingerprint.write_checks(data[:-CHECK_BYTES], data[-CHECK_BYTES:].view(torch.int64))


class WaveSender:
    """Sends a trainer rank's ``part`` of a plan to one engine, whose first rank is ``first`` in the group."""

    def __init__(self, part: Part, group: TransferGroup, first: int, device: torch.device) -> None:
        self._group = group
        waves = [wave for wave in part.waves if wave]
        size = max((sum(aligned(m.nbytes) for m in wave) for wave in waves), default=0)
        buffers = [group.buffer(size) for _ in range(SEND_BUFFERS)]
        sizes = [sum(len(message.regions) for message in wave) for wave in waves]
        numbers = DeviceNumbers.zeros(sum(sizes), device).split(sizes)
        self._waves = [
            _wave(buffers[number % SEND_BUFFERS], wave, part, first, numbers[number])
            for number, wave in enumerate(waves)
        ]
        fingerprint.compile_for(device)
        wave_packer.compile_for(device, fp8=any(tensor.scaled for tensor in part.tensors.values()))

    def send(self, shards: Shards, patience: float) -> None:
        """Send one version. ``patience``: seconds that the rank waits for a wave. Raises TransferError."""
        transfers: list[Transfer] = []
        for number, wave in enumerate(self._waves):
            if number >= SEND_BUFFERS:
                transfers[number - SEND_BUFFERS].wait()  # its buffer is reused now
            wave.pack(shards)
            transfers.append(self._group.send(wave.messages, time.monotonic() + patience))
            PROGRESS.add("waves sent")
        for transfer in transfers[-SEND_BUFFERS:]:
            transfer.wait()


def _wave(buffer: torch.Tensor, wave: Wave, part: Part, first: int, numbers: DeviceNumbers) -> _Wave:
    messages: list[tuple[torch.Tensor, int]] = []
    targets: list[Target] = []
    gaps: list[torch.Tensor] = []
    start = 0
    for message in wave:
        data = buffer[start : start + message.nbytes]
        messages.append((data, first + message.landing))
        targets += _targets(data, message, part)
        gaps += _gaps(data, message, part)
        start += aligned(message.nbytes)
    return _Wave(tuple(messages), wave_packer.packer(targets, numbers), tuple(gaps))


def _gaps(data: torch.Tensor, message: Message, part: Part) -> list[torch.Tensor]:
    of_regions, end = places(message.regions, part.tensors)
    used = sorted([place.values for place in of_regions] + [p.scales for p in of_regions if p.scales])
    edges = [*(start for start, _ in used[1:]), end]
    return [data[stop:edge] for (_, stop), edge in zip(used, edges, strict=True) if stop < edge]


def _targets(data: torch.Tensor, message: Message, part: Part) -> list[Target]:
    of_regions, _ = places(message.regions, part.tensors)
    targets = []
    for region, place in zip(message.regions, of_regions, strict=True):
        dtype = dtype_of(part.tensors[region.tensor].dtype)
        values = _view(data, place.values, dtype, region.box)
        scales = _view(data, place.scales, torch.float32, scale_box(region.box)) if place.scales else None
        targets.append(Target(region.tensor, region.box, values, scales))
    return targets


def _view(data: torch.Tensor, place: tuple[int, int], dtype: torch.dtype, box: Box) -> torch.Tensor:
    return data[place[0] : place[1]].view(dtype).view(box.bottom - box.top, box.right - box.left)
