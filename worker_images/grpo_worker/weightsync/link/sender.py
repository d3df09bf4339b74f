"""The trainer rank's end of a link."""

import time
from collections.abc import Iterator, Mapping, Sequence

import torch

from grpo_worker.data.fp8 import FP8_BLOCK, Part, check_blocks, is_quantised, quantise_into
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
                shards.fill(into)
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
