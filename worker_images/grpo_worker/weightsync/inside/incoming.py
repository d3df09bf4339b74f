"""The ways in which a version's bytes come to an engine's rank."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from grpo_worker.weightsync.inside.fingerprint import fingerprint
from grpo_worker.weightsync.inside.request import DirectLoad
from grpo_worker.weightsync.link.peers import Peers
from grpo_worker.weightsync.link.sender import copy_all
from grpo_worker.weightsync.link.shipment import Message


class DirectLoadError(RuntimeError):
    """The version is not in the model, or not whole; the message says why."""


@dataclass(frozen=True, slots=True)
class Spec:
    """A tensor of a bucket and its place there (bytes)."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    nbytes: int


def view_of(flat: torch.Tensor, spec: Spec) -> torch.Tensor:
    """The tensor in the bucket's bytes."""
    return flat[spec.start : spec.start + spec.nbytes].view(spec.dtype).view(spec.shape)


class Work(Protocol):
    """A transfer under way."""

    def wait(self) -> Any: ...


class Incoming(Protocol):
    """One version under way to this rank."""

    def receive(self, index: int, flat: torch.Tensor) -> Work:
        """Begin to fill ``flat``, uint8 [bytes of bucket ``index``]."""
        ...

    def verified(self) -> list[int]:
        """Fingerprints of the buckets, when all are there. Raises DirectLoadError when one is not what
        was sent."""
        ...


class Broadcast:
    """From an agent's memory; the agent is rank 0 of the group."""

    def __init__(self, request: DirectLoad, group: Any) -> None:
        self._wanted = request.fingerprints
        self._group = group
        self._found: list[torch.Tensor] = []

    def receive(self, index: int, flat: torch.Tensor) -> Work:
        work: Any = dist.broadcast(flat, src=0, group=self._group, async_op=True)
        return _Then(work, lambda: self._found.append(fingerprint(flat)))

    def verified(self) -> list[int]:
        found = [int(value) for value in self._found]
        for index, (mine, wanted) in enumerate(zip(found, self._wanted, strict=True)):
            if mine != wanted:
                raise DirectLoadError(f"bucket {index}: its bytes are not those that were sent")
        return found


class Linked:
    """From the trainer ranks themselves; each message is followed by its fingerprint."""

    def __init__(self, request: DirectLoad, peers: Peers, buckets: Sequence[Sequence[Spec]]) -> None:
        self._messages = request.messages
        self._buckets = buckets
        self._peers = peers
        self._deadline = time.monotonic() + request.timeout
        self._checks: list[tuple[int, int, torch.Tensor, torch.Tensor]] = []
        self._found: list[torch.Tensor] = []

    def receive(self, index: int, flat: torch.Tensor) -> Work:
        parts = [(message, _landing(message, flat), flat.new_empty(8)) for message in self._messages[index]]
        pairs = [(part, m.source) for m, data, tail in parts for part in (data, tail.view(torch.int64))]
        transfer = self._peers.receive(pairs, self._deadline)
        return _Then(transfer, lambda: self._arrived(index, flat, parts))

    def _arrived(
        self, index: int, flat: torch.Tensor, parts: Sequence[tuple[Message, torch.Tensor, torch.Tensor]]
    ) -> None:
        for message, data, tail in parts:
            self._checks.append((index, message.source, fingerprint(data), tail.view(torch.int64)))
            if message.start is None:
                deal_out(data, message, flat, self._buckets[index])
        alone = len(parts) == 1 and parts[0][0].start is not None
        self._found.append(self._checks[-1][2] if alone else fingerprint(flat))

    def verified(self) -> list[int]:
        mine = torch.stack([check[2] for check in self._checks]).tolist()  # one wait for all
        wanted = torch.cat([check[3] for check in self._checks]).tolist()
        for (index, source, *_), found, told in zip(self._checks, mine, wanted, strict=True):
            if found != told:
                raise DirectLoadError(
                    f"bucket {index}: the bytes of trainer rank {source} are not those it sent"
                )
        return [int(value) for value in torch.stack(self._found).tolist()]


@dataclass(frozen=True, slots=True)
class _Then:
    """A transfer, and what is done when it is over."""

    work: Work
    then: Any

    def wait(self) -> None:
        self.work.wait()
        self.then()


def _landing(message: Message, flat: torch.Tensor) -> torch.Tensor:
    if message.start is None:
        return flat.new_empty(message.nbytes)
    return flat[message.start : message.start + message.nbytes]


def deal_out(data: torch.Tensor, message: Message, flat: torch.Tensor, specs: Sequence[Spec]) -> None:
    """Put the pieces of ``message``, whose bytes are ``data``, into the tensors of the bucket ``flat``."""
    start, places, boxes = 0, [], []
    for piece in message.pieces:
        spec = specs[piece.tensor]
        place = view_of(flat, spec).narrow(piece.dim, piece.offset, piece.length)
        boxes.append(data[start : start + piece.nbytes].view(spec.dtype).view(place.shape))
        places.append(place)
        start += piece.nbytes
    copy_all(places, boxes)
