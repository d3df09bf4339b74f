"""The ways in which a version's bytes come to an engine's rank."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from grpo_worker.weightsync.protocol.direct_load import DirectLoad
from grpo_worker.weightsync.protocol.fingerprint import fingerprint


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


def specs_of(rows: Iterable[tuple[str, torch.dtype, Sequence[int]]]) -> list[Spec]:
    """Tensors of one bucket by name, dtype and shape; they lie in it without gaps."""
    specs, start = [], 0
    for name, dtype, shape in rows:
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        specs.append(Spec(name, dtype, tuple(shape), start, nbytes))
        start += nbytes
    return specs


def view_of(flat: torch.Tensor, spec: Spec) -> torch.Tensor:
    """The tensor in the bucket's bytes."""
    return flat[spec.start : spec.start + spec.nbytes].view(spec.dtype).view(spec.shape)


class PendingReceive(Protocol):
    """A transfer under way."""

    def wait(self) -> Any: ...


class Receiver(Protocol):
    """One version under way to this rank. ``partial``: only the bytes come that it has said it keeps;
    ``nbytes``: those that have been asked for."""

    partial: bool
    nbytes: int

    def beside(self, index: int) -> int:
        """Bytes that receiving bucket ``index`` needs beside its own."""
        ...

    def receive(self, index: int, flat: torch.Tensor, beside: torch.Tensor) -> PendingReceive:
        """Begin to fill ``flat``, uint8 [bytes of bucket ``index``]. ``beside``: uint8 [``beside(index)``],
        of no use any more when the bytes are there."""
        ...

    def verified(self) -> list[int]:
        """Fingerprints of all messages of the version, when all are there. Raises DirectLoadError when
        something is not what was sent."""
        ...


class StagedReceiver:
    """From an agent's memory; the agent is rank 0 of the group. Each bucket is one message."""

    partial = False

    def __init__(self, request: DirectLoad, group: Any) -> None:
        self.nbytes = 0
        self._wanted = request.fingerprints
        self._group = group
        self._found: list[torch.Tensor] = []

    def beside(self, index: int) -> int:
        return 0

    def receive(self, index: int, flat: torch.Tensor, beside: torch.Tensor) -> PendingReceive:
        self.nbytes += len(flat)
        work: Any = dist.broadcast(flat, src=0, group=self._group, async_op=True)
        return Then(work, lambda: self._found.append(fingerprint(flat)))

    def verified(self) -> list[int]:
        found = [int(value) for value in self._found]
        for index, (mine, wanted) in enumerate(zip(found, self._wanted, strict=True)):
            if mine != wanted:
                raise DirectLoadError(f"bucket {index}: its bytes are not those that were sent")
        return found


@dataclass(frozen=True, slots=True)
class Then:
    """A transfer, and what is done when it is over."""

    work: PendingReceive
    then: Any

    def wait(self) -> None:
        self.work.wait()
        self.then()
