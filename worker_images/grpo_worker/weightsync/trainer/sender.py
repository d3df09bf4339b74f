"""Sender: packs a trainer rank's shards into messages and sends them to the engine ranks."""

import time
from collections.abc import Iterator, Sequence

import torch

from grpo_worker.profiling.progress import PROGRESS
from grpo_worker.quantization.fp8 import FP8_BLOCK, Part, check_blocks, is_quantised, quantise_into
from grpo_worker.weightsync.protocol.buffers import aligned, copy_all
from grpo_worker.weightsync.protocol.byte_ranges import ByteRange, NeededRanges, from_json
from grpo_worker.weightsync.protocol.fingerprint import fingerprint
from grpo_worker.weightsync.protocol.transfer_plan import (
    Message,
    ShardKey,
    TransferBucket,
    TransferPlan,
    piece_views,
)
from grpo_worker.weightsync.transport.rendezvous import Transfer, TransferGroup

_BUFFERS = 2  # one bucket is packed while the other is sent

_Target = tuple[ShardKey, torch.Tensor]  # shard, and its view in a message


class Sender:
    """Sends the shards of trainer rank ``rank``, bucket by bucket."""

    def __init__(
        self, rank: int, transfer_plan: TransferPlan, group: TransferGroup, device: torch.device
    ) -> None:
        self._group = group
        own = [(b, [m for m in b.messages if m.source == rank]) for b in transfer_plan.buckets]
        own = [(bucket, messages) for bucket, messages in own if messages]
        size = max((sum(aligned(m.nbytes) for m in messages) for _, messages in own), default=0)
        buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(_BUFFERS)]
        self._batches = [
            list(_batch(buffers[number % _BUFFERS], bucket, messages))
            for number, (bucket, messages) in enumerate(own)
        ]
        self._needed: dict[int, NeededRanges] = {}  # by engine rank; a rank not in it gets every byte

    def send(self, parts: Sequence[Part], timeout: float, fp8: bool) -> None:
        """Send one version, this rank's ``parts``, within ``timeout`` seconds. Raises TransferError."""
        deadline = time.monotonic() + timeout
        shards = Shards(parts, fp8)
        self._read_needed_ranges()
        transfers: list[Transfer] = []
        for number, batch in enumerate(self._batches):
            if number >= _BUFFERS:
                transfers.pop(0).wait()  # its buffer is reused now
            for _, targets in batch:
                shards.fill(targets)
            messages = [_MessageCuts(data) for data, _ in batch]
            transfers.append(self._group.send(list(self._addressed(number, messages)), deadline))
            PROGRESS.add("buckets sent")
        for transfer in transfers:
            transfer.wait()

    def _read_needed_ranges(self) -> None:
        """Read the ranges of the engine ranks that have published them. Raises TransferError."""
        for engine in self._group.engines:
            if engine not in self._needed and (text := self._group.posted_by(engine)):
                self._needed[engine] = from_json(text)

    def _addressed(
        self, number: int, messages: Sequence["_MessageCuts"]
    ) -> Iterator[tuple[torch.Tensor, int]]:
        """Yield (tensor, engine rank) for everything to send of batch ``number``."""
        for engine in self._group.engines:
            for index, message in enumerate(messages):
                needed = self._needed.get(engine)
                for tensor in message.cut(None if needed is None else needed[number][index]):
                    yield tensor, engine


class _MessageCuts:
    """A message (uint8 [bytes]), cut into the byte ranges that engine ranks need."""

    def __init__(self, data: torch.Tensor) -> None:
        self._data = data
        self._fingerprint = fingerprint(data)
        self._cuts: dict[tuple[ByteRange, ...], list[torch.Tensor]] = {}

    def cut(self, byte_ranges: Sequence[ByteRange] | None) -> list[torch.Tensor]:
        """Return the bytes of each range, and after them their fingerprints: int64 [1 + ranges].

        The first fingerprint is that of the whole message. None: all bytes as one range.
        """
        key = tuple(byte_ranges) if byte_ranges is not None else ((0, len(self._data)),)
        if key not in self._cuts:
            parts = [self._data[first:last] for first, last in key]
            prints = [self._fingerprint] + [
                self._fingerprint if len(part) == len(self._data) else fingerprint(part) for part in parts
            ]
            self._cuts[key] = [*parts, torch.stack(prints)]
        return self._cuts[key]


def _batch(
    buffer: torch.Tensor, bucket: TransferBucket, messages: Sequence[Message]
) -> Iterator[tuple[torch.Tensor, list[_Target]]]:
    """Yield each message's bytes in ``buffer``, and the views of its pieces."""
    start = 0
    for message in messages:
        data = buffer[start : start + message.nbytes]
        yield data, piece_views(data, bucket, message)
        start += aligned(message.nbytes)


class Shards:
    """A rank's shards by name and offset, quantized to FP8 when they are packed."""

    def __init__(self, parts: Sequence[Part], fp8: bool) -> None:
        self._parts = {(part[0], part[3]): part for part in parts}
        self._fp8 = fp8
        self._scales: dict[ShardKey, torch.Tensor] = {}  # kept until packed, which follows their values

    def fill(self, targets: Sequence[_Target]) -> None:
        """Write each shard into its view."""
        plain = [(view, key) for key, view in targets if not (self._fp8 and is_quantised(key[0]))]
        if len(plain) < len(targets):
            self._quantise([(key, view) for key, view in targets if is_quantised(key[0])])
        copy_all([view for view, _ in plain], [self._get(key) for _, key in plain])

    def _get(self, key: ShardKey) -> torch.Tensor:
        return self._scales.pop(key) if key in self._scales else self._parts[key][-1]

    def _quantise(self, targets: Sequence[_Target]) -> None:
        for key, _ in targets:
            check_blocks(self._parts[key])
        scales = quantise_into([(self._parts[key][-1], view) for key, view in targets])
        for ((name, offset), _), scale in zip(targets, scales, strict=True):
            self._scales[f"{name}_scale_inv", offset // FP8_BLOCK] = scale
