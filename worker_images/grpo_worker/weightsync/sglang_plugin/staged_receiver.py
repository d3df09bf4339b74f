"""Receiver of a staged version in an engine rank, from the agent's stream."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch

from grpo_worker.weightsync.planner.rank_parts import Table
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


class Source(Protocol):
    """Bytes of buckets, each followed by its fingerprint; see AgentStream."""

    def beat(self) -> None: ...

    def send_kept(self, table: Table) -> None: ...

    def read_into(self, flat: torch.Tensor) -> None: ...

    def read_fingerprint(self) -> int: ...


class StagedReceiver:
    """Receives what the agent streams: the bytes of each bucket, and then their fingerprint.

    ``nbytes``: bytes requested so far.
    """

    def __init__(self, source: Source) -> None:
        self.nbytes = 0
        self._source = source
        self._thread = ThreadPoolExecutor(1)
        self._received: list[torch.Tensor] = []
        self._sent: list[int] = []

    def receive(self, flat: torch.Tensor) -> Callable[[], None]:
        """Start to receive the next bucket into ``flat`` (uint8 [bytes of the bucket]).

        Returns a function that waits until the bucket is there, and raises TransferError if it does not come.
        """
        self.nbytes += len(flat)
        # The copies of the bucket that was in this memory are in this stream.
        stream = torch.cuda.current_stream() if flat.is_cuda else None

        def read() -> None:
            with torch.cuda.stream(stream):
                self._source.read_into(flat)
            self._sent.append(self._source.read_fingerprint())

        read_by_thread = self._thread.submit(read)

        def wait() -> None:
            read_by_thread.result()
            self._received.append(fingerprint(flat))

        return wait

    def verify(self) -> list[int]:
        """Return the fingerprints of all buckets, after all have been received.

        Raises DirectLoadError if received bytes differ from the sent ones.
        """
        received = [int(value) for value in self._received]
        for index, (ours, sent) in enumerate(zip(received, self._sent, strict=True)):
            if ours != sent:
                raise DirectLoadError(f"bucket {index}: its bytes are not those that were sent")
        return received
