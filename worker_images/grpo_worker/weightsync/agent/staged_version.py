"""Staged version: one that the trainers hold in host memory, streamed chunk by chunk to the engine."""

import json
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from grpo_worker.weightsync.agent.blobs import Blobs, Bytes
from grpo_worker.weightsync.agent.chunks import CHUNK, Chunk, Extent, chunks_of
from grpo_worker.weightsync.protocol.digest import digest
from grpo_worker.weightsync.protocol.direct_load import DirectLoad
from grpo_worker.weightsync.protocol.fingerprint import Fingerprint
from grpo_worker.weightsync.protocol.transfer_plan import TransferBucket, TransferPlan, nbytes


@dataclass(frozen=True, slots=True)
class StagedVersion:
    """A version and where its bytes are. ``digests``: of the ranks' blobs."""

    version: int
    plan: TransferPlan
    digests: list[str]
    blobs: Blobs = field(repr=False)

    def direct_load(self) -> DirectLoad:
        """Return the request that announces the buckets."""
        return DirectLoad(self.plan.plan_id, tuple(len(bucket.tensors) for bucket in self.plan.buckets))


def checksum_of(fingerprints: Sequence[int]) -> str:
    """Return the checksum of a version from its messages' fingerprints."""
    return digest(json.dumps(list(fingerprints)).encode())


@dataclass(frozen=True, slots=True)
class Sendable:
    """The bytes of a chunk. ``fingerprint``: of the bucket's bytes, with its last chunk."""

    chunk: Chunk
    data: Bytes = field(repr=False)
    fingerprint: int | None


class VersionStream:
    """The chunks of a version in the order in which they are sent: one is fetched while another is sent.

    Use it as a context manager. ``limit``: bytes of a chunk. ``timeout``: seconds in which a chunk must be
    complete. The data of a chunk are overwritten when the chunk after the next is fetched.
    """

    def __init__(self, staged: StagedVersion, timeout: float, limit: int = CHUNK) -> None:
        self._blobs = staged.blobs
        self._buckets = staged.plan.buckets
        self._timeout = timeout
        size = min(limit, max(sum(map(nbytes, bucket.tensors)) for bucket in self._buckets))
        self._memory = [np.empty(size, dtype=np.uint8) for _ in range(2)]
        self._chunks = enumerate(
            chain.from_iterable(chunks_of(*numbered, size) for numbered in enumerate(self._buckets))
        )
        self._thread = ThreadPoolExecutor(1)
        self._next: Future[Sendable | None] | None = None
        self._prints: _BucketPrints | None = None
        self.fingerprints: list[int] = []  # of the messages of a direct transfer

    def __enter__(self) -> "VersionStream":
        self._next = self._thread.submit(self._fetch)
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)
        self._blobs.close()

    def wait_for_first(self) -> None:
        """Wait until the first chunk is there. Raises FetchError."""
        assert self._next is not None, "used outside of its context"
        self._next.result()

    def __iter__(self) -> Iterator[Sendable]:
        """Yield the chunks. Raises FetchError."""
        assert self._next is not None, "used outside of its context"
        while (ready := self._next.result()) is not None:
            self._next = self._thread.submit(self._fetch)
            yield ready

    def checksum(self) -> str:
        """Return the checksum of all bytes; a direct transfer of the same version gives the same one."""
        return checksum_of(self.fingerprints)

    def _fetch(self) -> Sendable | None:
        number, chunk = next(self._chunks, (0, None))
        if chunk is None:
            return None
        if not chunk.start:
            self._prints = _BucketPrints(self._buckets[chunk.bucket])
        assert self._prints is not None, "a bucket begins with byte 0"
        data = self._memory[number % 2][: chunk.nbytes]
        self._blobs.fill(chunk, data, time.monotonic() + self._timeout, self._prints.add_extent)
        self._prints.whole.add(chunk.start, data)
        if not chunk.last:
            return Sendable(chunk, data, None)
        self.fingerprints += [message.value() for message in self._prints.messages]
        return Sendable(chunk, data, self._prints.whole.value())


class _BucketPrints:
    """Fingerprints of a bucket and of the messages that fill it."""

    def __init__(self, bucket: TransferBucket) -> None:
        self.whole = Fingerprint(sum(map(nbytes, bucket.tensors)))
        self.messages = [Fingerprint(message.nbytes) for message in bucket.messages]
        self._locks = [threading.Lock() for _ in bucket.messages]

    def add_extent(self, extent: Extent, offset: int, data: Bytes) -> None:
        with self._locks[extent.message]:
            self.messages[extent.message].add(extent.position + offset, data)
