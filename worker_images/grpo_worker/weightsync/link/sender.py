"""The trainer rank's end of a link."""

import time
from collections.abc import Iterator, Mapping, Sequence

import torch

from grpo_worker.data.fp8 import Part, quantised_parts
from grpo_worker.weightsync.dtypes import dtype_of
from grpo_worker.weightsync.inside.fingerprint import fingerprint
from grpo_worker.weightsync.link.peers import Peers, Transfer
from grpo_worker.weightsync.link.shipment import Message, Shipment, ShippedBucket

Box = tuple[str, int]  # name and offset of a shard
_AHEAD = 2  # buckets that are packed or under way
_ALIGNED = 64  # a message's place in the buffer fits every dtype


class Sender:
    """Sends the shards of trainer rank ``rank``, bucket after bucket; packs one while another leaves."""

    def __init__(self, rank: int, shipment: Shipment, peers: Peers, device: torch.device) -> None:
        self._peers = peers
        mine = [(b, [m for m in b.messages if m.source == rank]) for b in shipment.buckets]
        mine = [(bucket, messages) for bucket, messages in mine if messages]
        size = max((sum(_room(m) for m in messages) for _, messages in mine), default=0)
        buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(_AHEAD)]
        self._batches = [
            list(_batch(buffers[number % _AHEAD], bucket, messages))
            for number, (bucket, messages) in enumerate(mine)
        ]

    def send(self, parts: Sequence[Part], timeout: float, fp8: bool) -> None:
        """One version, ``parts`` of this rank, within ``timeout`` seconds. Raises LinkError."""
        deadline = time.monotonic() + timeout
        shards = Shards(parts, fp8)
        under_way: list[Transfer] = []
        for number, batch in enumerate(self._batches):
            if number >= _AHEAD:
                under_way.pop(0).wait()
            tensors = []
            for data, into in batch:
                copy_all([place for _, place in into], [shards.get(*box) for box, _ in into])
                tensors += [data, fingerprint(data).reshape(1)]
            under_way.append(self._peers.send(tensors, deadline))
        for transfer in under_way:
            transfer.wait()


def _room(message: Message) -> int:
    return -(-message.nbytes // _ALIGNED) * _ALIGNED


def _batch(
    buffer: torch.Tensor, bucket: ShippedBucket, messages: Sequence[Message]
) -> Iterator[tuple[torch.Tensor, list[tuple[Box, torch.Tensor]]]]:
    """Each message's bytes in ``buffer``, and where its pieces stand."""
    start = 0
    for message in messages:
        data = buffer[start : start + message.nbytes]
        yield data, places(data, bucket, message)
        start += _room(message)


class Shards:
    """This rank's shards by place, quantised when they are asked for."""

    def __init__(self, parts: Sequence[Part], fp8: bool) -> None:
        self._parts = {(part[0], part[3]): part for part in parts}
        self._fp8 = fp8
        self._waiting: dict[Box, torch.Tensor] = {}  # scales, until they are asked for

    def get(self, name: str, offset: int) -> torch.Tensor:
        box = (name, offset)
        if not self._fp8:
            return self._parts[box][-1]
        if box not in self._waiting:
            for made, _, _, at, tensor in quantised_parts([self._parts[box]]):
                self._waiting[made, at] = tensor
        return self._waiting.pop(box)


def places(
    message_bytes: torch.Tensor, bucket: ShippedBucket, message: Message
) -> list[tuple[Box, torch.Tensor]]:
    """Where each piece stands in its message, uint8 [bytes of the message]."""
    found, start = [], 0
    for piece in message.pieces:
        tensor = bucket.tensors[piece.tensor]
        shape = list(tensor.shape)
        shape[piece.dim] = piece.length
        view = message_bytes[start : start + piece.nbytes].view(dtype_of(tensor.dtype)).view(shape)
        found.append(((tensor.name, piece.offset), view))
        start += piece.nbytes
    return found


def copy_all(places: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """places[i] = tensors[i], those of one type by one launch."""
    groups: Mapping[torch.dtype, list[int]] = {
        dtype: [i for i, place in enumerate(places) if place.dtype == dtype]
        for dtype in {place.dtype for place in places}
    }
    for members in groups.values():
        torch._foreach_copy_([places[i] for i in members], [tensors[i].detach() for i in members])
