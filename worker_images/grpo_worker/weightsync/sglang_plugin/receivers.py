"""Receivers of one version in an engine rank: the protocol, and the receiver from the agent's stream."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from grpo_worker.weightsync.protocol.fingerprint import fingerprint


class DirectLoadError(RuntimeError):
    """The version is not, or not completely, in the model; the message says why."""


@dataclass(frozen=True, slots=True)
class Spec:
    """A tensor of a bucket, and its position there (bytes)."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    nbytes: int


def specs_of(rows: Iterable[tuple[str, torch.dtype, Sequence[int]]]) -> list[Spec]:
    """Return the specs of a bucket's tensors (name, dtype, shape), which are packed without gaps."""
    specs, start = [], 0
    for name, dtype, shape in rows:
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        specs.append(Spec(name, dtype, tuple(shape), start, nbytes))
        start += nbytes
    return specs


def view_of(flat: torch.Tensor, spec: Spec) -> torch.Tensor:
    """Return the view of a tensor in the bytes of its bucket."""
    return flat[spec.start : spec.start + spec.nbytes].view(spec.dtype).view(spec.shape)


class PendingReceive(Protocol):
    """A transfer in progress."""

    def wait(self) -> Any: ...


class Receiver(Protocol):
    """Receives one version.

    ``partial``: only the byte ranges that this rank needs are received.
    ``nbytes``: bytes requested so far.
    """

    partial: bool
    nbytes: int

    def scratch_bytes(self, index: int) -> int:
        """Return the bytes of scratch memory that bucket ``index`` needs in addition to its own."""
        ...

    def receive(self, index: int, flat: torch.Tensor, scratch: torch.Tensor) -> PendingReceive:
        """Start to receive bucket ``index`` into ``flat`` (uint8 [bytes of the bucket]).

        ``scratch``: uint8 [``scratch_bytes(index)``], free again once the receive has completed.
        """
        ...

    def verify(self) -> list[int]:
        """Return the fingerprints of all messages, after all have been received.

        Raises DirectLoadError if received bytes differ from the sent ones.
        """
        ...


class Source(Protocol):
    """Bytes of buckets, each followed by its fingerprint; see AgentStream."""

    def read_into(self, flat: torch.Tensor) -> None: ...

    def read_fingerprint(self) -> int: ...


class StagedReceiver:
    """Receives what the agent streams: the bytes of each bucket, and then their fingerprint."""

    partial = False

    def __init__(self, source: Source) -> None:
        self.nbytes = 0
        self._source = source
        self._thread = ThreadPoolExecutor(1)
        self._received: list[torch.Tensor] = []
        self._sent: list[int] = []

    def scratch_bytes(self, index: int) -> int:
        return 0

    def receive(self, index: int, flat: torch.Tensor, scratch: torch.Tensor) -> PendingReceive:
        self.nbytes += len(flat)
        # The copies of the bucket that was in this memory are in this stream.
        stream = torch.cuda.current_stream() if flat.is_cuda else None

        def read() -> None:
            with torch.cuda.stream(stream):
                self._source.read_into(flat)
            self._sent.append(self._source.read_fingerprint())

        read_by_thread = self._thread.submit(read)
        return ReceiveThenCall(_Waits(read_by_thread), lambda: self._received.append(fingerprint(flat)))

    def verify(self) -> list[int]:
        received = [int(value) for value in self._received]
        for index, (ours, sent) in enumerate(zip(received, self._sent, strict=True)):
            if ours != sent:
                raise DirectLoadError(f"bucket {index}: its bytes are not those that were sent")
        return received


@dataclass(frozen=True, slots=True)
class _Waits:
    future: "Future[None]"

    def wait(self) -> None:
        self.future.result()


@dataclass(frozen=True, slots=True)
class ReceiveThenCall:
    """A transfer in progress, and a function to call once it has completed."""

    transfer: PendingReceive
    on_completion: Callable[[], None]

    def wait(self) -> None:
        self.transfer.wait()
        self.on_completion()
