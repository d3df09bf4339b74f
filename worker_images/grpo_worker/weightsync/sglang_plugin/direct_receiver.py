"""What comes from the trainer ranks: of the first version every byte, later what this rank keeps."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from grpo_worker.weightsync.protocol.buffers import aligned, copy_all
from grpo_worker.weightsync.protocol.byte_ranges import ByteRange, Extent, came, to_json, wanted
from grpo_worker.weightsync.protocol.direct_load import DirectLoad
from grpo_worker.weightsync.protocol.fingerprint import fingerprint
from grpo_worker.weightsync.protocol.transfer_plan import Message
from grpo_worker.weightsync.sglang_plugin.receivers import (
    DirectLoadError,
    PendingReceive,
    Spec,
    Then,
    view_of,
)
from grpo_worker.weightsync.transport.rendezvous import TransferGroup


class GroupMembership:
    """The link that this rank is a member of. ``wanted``: by bucket and message, the stretches that this
    rank has said it keeps; None before."""

    def __init__(self, members: TransferGroup) -> None:
        self.members = members
        self.wanted: list[list[list[ByteRange]]] | None = None

    def tell(self, load: DirectLoad, buckets: Sequence[Sequence[Spec]], kept: list[list[ByteRange]]) -> None:
        """Let the trainer ranks know which bytes of each bucket this rank keeps. Raises LinkError."""
        found = [
            wanted(messages, [Extent(spec.start, spec.nbytes, spec.shape[0]) for spec in specs], byte_ranges)
            for messages, specs, byte_ranges in zip(load.messages, buckets, kept, strict=True)
        ]
        for source in sorted({message.source for messages in load.messages for message in messages}):
            told = [
                [cut for message, cut in zip(messages, cuts, strict=True) if message.source == source]
                for messages, cuts in zip(load.messages, found, strict=True)
            ]
            self.members.tell(source, to_json([bucket for bucket in told if bucket]))
        self.wanted = found


@dataclass(frozen=True, slots=True)
class _Arriving:
    """A message under way. ``tail``: int64 [1 + stretches], the fingerprints of the whole and of each."""

    message: Message
    data: torch.Tensor
    byte_ranges: Sequence[ByteRange]
    tail: torch.Tensor

    @property
    def parts(self) -> list[torch.Tensor]:
        return [self.data[first:last] for first, last in self.byte_ranges]


class DirectReceiver:
    """From the trainer ranks themselves; each message is followed by its fingerprints."""

    def __init__(self, request: DirectLoad, link: GroupMembership, buckets: Sequence[Sequence[Spec]]) -> None:
        self.partial, self.nbytes = link.wanted is not None, 0
        self._request = request
        self._link = link
        self._buckets = buckets
        self._deadline = time.monotonic() + request.timeout
        self._checks: list[tuple[int, int, list[torch.Tensor], torch.Tensor]] = []

    def beside(self, index: int) -> int:
        return sum(aligned(m.nbytes) for m in self._request.messages[index] if m.start is None)

    def receive(self, index: int, flat: torch.Tensor, beside: torch.Tensor) -> PendingReceive:
        arriving = list(self._arriving(index, flat, beside))
        pairs = [(tensor, a.message.source) for a in arriving for tensor in (*a.parts, a.tail)]
        transfer = self._link.members.receive(pairs, self._deadline)
        return Then(transfer, lambda: self._arrived(index, flat, arriving))

    def _arriving(self, index: int, flat: torch.Tensor, beside: torch.Tensor) -> Iterator[_Arriving]:
        used = 0
        for place, message in enumerate(self._request.messages[index]):
            told = self._link.wanted
            byte_ranges = [(0, message.nbytes)] if told is None else told[index][place]
            tail = torch.empty(1 + len(byte_ranges), dtype=torch.int64, device=flat.device)
            self.nbytes += sum(last - first for first, last in byte_ranges)
            if message.start is None:
                data = beside[used : used + message.nbytes]
                used += aligned(message.nbytes)
            else:
                data = flat[message.start : message.start + message.nbytes]
            yield _Arriving(message, data, byte_ranges, tail)

    def _arrived(self, index: int, flat: torch.Tensor, arriving: Sequence[_Arriving]) -> None:
        for each in arriving:
            found = [fingerprint(part) for part in each.parts]
            self._checks.append((index, each.message.source, found, each.tail))
            if each.message.start is None:
                deal_out(each.data, each.message, flat, self._buckets[index], each.byte_ranges)

    def verified(self) -> list[int]:
        mine = _values([part for *_, parts, _ in self._checks for part in parts])
        told = torch.cat([check[3] for check in self._checks]).tolist()
        messages, at = [], 0
        for index, source, parts, _ in self._checks:
            messages.append(int(told[at]))
            if told[at + 1 : at + 1 + len(parts)] != [mine.pop(0) for _ in parts]:
                raise DirectLoadError(
                    f"bucket {index}: the bytes of trainer rank {source} are not those it sent"
                )
            at += 1 + len(parts)
        return messages

    def keep(self, kept: list[list[ByteRange]]) -> None:
        """These bytes of each bucket are what this rank takes: no others need come with later versions.
        Raises LinkError."""
        self._link.tell(self._request, self._buckets, kept)


def _values(numbers: list[torch.Tensor]) -> list[int]:
    """One wait for all of them."""
    return [int(value) for value in torch.stack(numbers).tolist()] if numbers else []


def deal_out(
    data: torch.Tensor, message: Message, flat: torch.Tensor, specs: Sequence[Spec],
    byte_ranges: Sequence[ByteRange],
) -> None:  # fmt: skip
    """Put the pieces of ``message`` that came into the tensors of the bucket ``flat``. ``data``: its bytes,
    of which the ``byte_ranges`` are there."""
    places, boxes = [], []
    for start, piece in came(message.pieces, byte_ranges):
        spec = specs[piece.tensor]
        place = view_of(flat, spec).narrow(piece.dim, piece.offset, piece.length)
        boxes.append(data[start : start + piece.nbytes].view(spec.dtype).view(place.shape))
        places.append(place)
    copy_all(places, boxes)
