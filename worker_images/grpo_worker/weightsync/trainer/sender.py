"""The trainer rank's end of a link."""

import time
from collections.abc import Iterator, Sequence

import torch

from grpo_worker.quantization.fp8 import FP8_BLOCK, Part, check_blocks, is_quantised, quantise_into
from grpo_worker.weightsync.protocol.buffers import aligned, copy_all
from grpo_worker.weightsync.protocol.byte_ranges import ByteRange, Wanted, from_json
from grpo_worker.weightsync.protocol.fingerprint import fingerprint
from grpo_worker.weightsync.protocol.transfer_plan import Box, Message, TransferBucket, TransferPlan, places
from grpo_worker.weightsync.transport.rendezvous import Transfer, TransferGroup

_AHEAD = 2  # buckets that are packed or under way


class Sender:
    """Sends the shards of trainer rank ``rank``, bucket after bucket; packs one while another leaves."""

    def __init__(
        self, rank: int, transfer_plan: TransferPlan, members: TransferGroup, device: torch.device
    ) -> None:
        self._members = members
        mine = [(b, [m for m in b.messages if m.source == rank]) for b in transfer_plan.buckets]
        mine = [(bucket, messages) for bucket, messages in mine if messages]
        size = max((sum(aligned(m.nbytes) for m in messages) for _, messages in mine), default=0)
        buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(_AHEAD)]
        self._batches = [
            list(_batch(buffers[number % _AHEAD], bucket, messages))
            for number, (bucket, messages) in enumerate(mine)
        ]
        self._wanted: dict[int, Wanted] = {}  # by engine rank, once it has told

    def send(self, parts: Sequence[Part], timeout: float, fp8: bool) -> None:
        """One version, ``parts`` of this rank, within ``timeout`` seconds. Raises LinkError."""
        deadline = time.monotonic() + timeout
        shards = Shards(parts, fp8)
        self._hear()
        under_way: list[Transfer] = []
        for number, batch in enumerate(self._batches):
            if number >= _AHEAD:
                under_way.pop(0).wait()
            for _, into in batch:
                shards.fill(into)
            messages = [_Cut(data) for data, _ in batch]
            under_way.append(self._members.send(list(self._addressed(number, messages)), deadline))
        for transfer in under_way:
            transfer.wait()

    def _hear(self) -> None:
        """Which engine ranks have said what they keep. Raises LinkError."""
        for engine in self._members.engines:
            if engine not in self._wanted and (told := self._members.told(engine)):
                self._wanted[engine] = from_json(told)

    def _addressed(self, number: int, messages: Sequence["_Cut"]) -> Iterator[tuple[torch.Tensor, int]]:
        """What each engine rank gets of this rank's ``messages`` of a bucket."""
        for engine in self._members.engines:
            for place, message in enumerate(messages):
                told = self._wanted.get(engine)
                for tensor in message.cut(None if told is None else told[number][place]):
                    yield tensor, engine


class _Cut:
    """A message, uint8 [bytes], in the stretches that somebody wants of it."""

    def __init__(self, data: torch.Tensor) -> None:
        self._data = data
        self._whole = fingerprint(data)
        self._known: dict[tuple[ByteRange, ...], list[torch.Tensor]] = {}

    def cut(self, byte_ranges: Sequence[ByteRange] | None) -> list[torch.Tensor]:
        """The stretches (None: all bytes as one), and the fingerprints of the whole and of each:
        int64 [1 + stretches]."""
        key = tuple(byte_ranges) if byte_ranges is not None else ((0, len(self._data)),)
        if key not in self._known:
            found = [self._data[first:last] for first, last in key]
            prints = [self._whole] + [
                self._whole if len(part) == len(self._data) else fingerprint(part) for part in found
            ]
            self._known[key] = [*found, torch.stack(prints)]
        return self._known[key]


def _batch(
    buffer: torch.Tensor, bucket: TransferBucket, messages: Sequence[Message]
) -> Iterator[tuple[torch.Tensor, list[tuple[Box, torch.Tensor]]]]:
    """Each message's bytes in ``buffer``, and where its pieces stand."""
    start = 0
    for message in messages:
        data = buffer[start : start + message.nbytes]
        yield data, places(data, bucket, message)
        start += aligned(message.nbytes)


class Shards:
    """This rank's shards by place, quantised when they are asked for."""

    def __init__(self, parts: Sequence[Part], fp8: bool) -> None:
        self._parts = {(part[0], part[3]): part for part in parts}
        self._fp8 = fp8
        self._scales: dict[Box, torch.Tensor] = {}  # until they are asked for, after their values

    def fill(self, into: Sequence[tuple[Box, torch.Tensor]]) -> None:
        """Write the elements of each box into its place."""
        plain = [(place, box) for box, place in into if not (self._fp8 and is_quantised(box[0]))]
        if len(plain) < len(into):
            self._quantise([(box, place) for box, place in into if is_quantised(box[0])])
        copy_all([place for place, _ in plain], [self._get(box) for _, box in plain])

    def _get(self, box: Box) -> torch.Tensor:
        return self._scales.pop(box) if box in self._scales else self._parts[box][-1]

    def _quantise(self, into: Sequence[tuple[Box, torch.Tensor]]) -> None:
        for box, _ in into:
            check_blocks(self._parts[box])
        found = quantise_into([(self._parts[box][-1], place) for box, place in into])
        for ((name, offset), _), scale in zip(into, found, strict=True):
            self._scales[f"{name}_scale_inv", offset // FP8_BLOCK] = scale
