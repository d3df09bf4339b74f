"""Receiver from the trainer ranks: every byte of the first version, then the byte ranges this rank needs."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from grpo_worker.weightsync.protocol.buffers import aligned, copy_all
from grpo_worker.weightsync.protocol.byte_ranges import (
    ByteRange,
    Extent,
    NeededRanges,
    needed_ranges,
    received_pieces,
    to_json,
)
from grpo_worker.weightsync.protocol.direct_load import DirectLoad
from grpo_worker.weightsync.protocol.fingerprint import fingerprint
from grpo_worker.weightsync.protocol.transfer_plan import Message
from grpo_worker.weightsync.sglang_plugin.receivers import (
    DirectLoadError,
    PendingReceive,
    ReceiveThenCall,
    Spec,
    view_of,
)
from grpo_worker.weightsync.transport.rendezvous import TransferGroup


class GroupMember:
    """This engine rank in a transfer group.

    ``needed``: byte ranges that this rank has published, by bucket and message; None before that.
    """

    def __init__(self, group: TransferGroup) -> None:
        self.group = group
        self.needed: NeededRanges | None = None

    def publish_needed_ranges(
        self, load: DirectLoad, buckets: Sequence[Sequence[Spec]], used: list[list[ByteRange]]
    ) -> None:
        """Tell each trainer rank which bytes of its messages this rank needs. Raises TransferError.

        ``used``: byte ranges of each bucket that this rank copies into its parameters.
        """
        needed = [
            needed_ranges(messages, [Extent(s.start, s.nbytes, s.shape[0]) for s in specs], used_of_bucket)
            for messages, specs, used_of_bucket in zip(load.messages, buckets, used, strict=True)
        ]
        for source in sorted({message.source for messages in load.messages for message in messages}):
            of_source = [
                [ranges for message, ranges in zip(messages, cuts, strict=True) if message.source == source]
                for messages, cuts in zip(load.messages, needed, strict=True)
            ]
            # A sender numbers only the buckets in which it has messages.
            self.group.post(source, to_json([bucket for bucket in of_source if bucket]))
        self.needed = needed


@dataclass(frozen=True, slots=True)
class _Incoming:
    """A message in progress. ``sent``: int64 [1 + ranges], the sender's fingerprints of the whole message
    and of each range.
    """

    message: Message
    data: torch.Tensor
    byte_ranges: Sequence[ByteRange]
    sent: torch.Tensor

    @property
    def parts(self) -> list[torch.Tensor]:
        return [self.data[first:last] for first, last in self.byte_ranges]


@dataclass(frozen=True, slots=True)
class _Check:
    """Fingerprints of a message to compare: of its ``received`` ranges, and those ``sent`` with it."""

    bucket: int
    source: int
    received: list[torch.Tensor]
    sent: torch.Tensor


class DirectReceiver:
    """Receives from the trainer ranks; each message is followed by its fingerprints."""

    def __init__(self, request: DirectLoad, member: GroupMember, buckets: Sequence[Sequence[Spec]]) -> None:
        self.partial, self.nbytes = member.needed is not None, 0
        self._request = request
        self._member = member
        self._buckets = buckets
        self._deadline = time.monotonic() + request.timeout
        self._checks: list[_Check] = []

    def scratch_bytes(self, index: int) -> int:
        return sum(aligned(m.nbytes) for m in self._request.messages[index] if m.start is None)

    def receive(self, index: int, flat: torch.Tensor, scratch: torch.Tensor) -> PendingReceive:
        incoming = list(self._incoming(index, flat, scratch))
        pairs = [(tensor, i.message.source) for i in incoming for tensor in (*i.parts, i.sent)]
        transfer = self._member.group.receive(pairs, self._deadline)
        return ReceiveThenCall(transfer, lambda: self._on_received(index, flat, incoming))

    def _incoming(self, index: int, flat: torch.Tensor, scratch: torch.Tensor) -> Iterator[_Incoming]:
        """Yield the messages of a bucket with the memory that receives them."""
        used, needed = 0, self._member.needed
        for number, message in enumerate(self._request.messages[index]):
            byte_ranges = [(0, message.nbytes)] if needed is None else needed[index][number]
            sent = torch.empty(1 + len(byte_ranges), dtype=torch.int64, device=flat.device)
            self.nbytes += sum(last - first for first, last in byte_ranges)
            if message.start is None:
                data = scratch[used : used + message.nbytes]
                used += aligned(message.nbytes)
            else:
                data = flat[message.start : message.start + message.nbytes]
            yield _Incoming(message, data, byte_ranges, sent)

    def _on_received(self, index: int, flat: torch.Tensor, incoming: Sequence[_Incoming]) -> None:
        for each in incoming:
            received = [fingerprint(part) for part in each.parts]
            self._checks.append(_Check(index, each.message.source, received, each.sent))
            if each.message.start is None:
                scatter(each.data, each.message, flat, self._buckets[index], each.byte_ranges)

    def verify(self) -> list[int]:
        ours = iter(_values([value for check in self._checks for value in check.received]))
        sent = iter(torch.cat([check.sent for check in self._checks]).tolist())
        messages = []
        for check in self._checks:
            count = len(check.received)
            message, *ranges = islice(sent, 1 + count)
            messages.append(int(message))
            if ranges != list(islice(ours, count)):
                raise DirectLoadError(
                    f"bucket {check.bucket}: the bytes of trainer rank {check.source} are not those it sent"
                )
        return messages

    def publish_needed_ranges(self, used: list[list[ByteRange]]) -> None:
        """Tell the trainer ranks which bytes this rank needs of later versions. Raises TransferError.

        ``used``: byte ranges of each bucket that this rank copies into its parameters.
        """
        self._member.publish_needed_ranges(self._request, self._buckets, used)


def _values(numbers: list[torch.Tensor]) -> list[int]:
    """Return the numbers after a single synchronization with the device."""
    return [int(value) for value in torch.stack(numbers).tolist()] if numbers else []


def scatter(
    data: torch.Tensor, message: Message, flat: torch.Tensor, specs: Sequence[Spec],
    byte_ranges: Sequence[ByteRange],
) -> None:  # fmt: skip
    """Copy the received pieces of ``message`` into their tensors in the bucket ``flat``.

    ``data``: the message's bytes, of which only ``byte_ranges`` were received.
    """
    targets, sources = [], []
    for start, piece in received_pieces(message.pieces, byte_ranges):
        spec = specs[piece.tensor]
        target = view_of(flat, spec).narrow(piece.dim, piece.offset, piece.length)
        sources.append(data[start : start + piece.nbytes].view(spec.dtype).view(target.shape))
        targets.append(target)
    copy_all(targets, sources)
