"""Staged version: one that the trainers hold in host memory, streamed chunk by chunk to the engine."""

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from grpo_worker.common.weight_checksum import checksum
from grpo_worker.weightsync.agent.blobs import Blobs, Bytes
from grpo_worker.weightsync.agent.chunks import CHUNK, Chunk, chunks_of
from grpo_worker.weightsync.protocol.direct_load import DirectLoad
from grpo_worker.weightsync.protocol.fingerprint import Fingerprint
from grpo_worker.weightsync.protocol.transfer_plan import TransferPlan, bucket_bytes


@dataclass(frozen=True, slots=True)
class StagedVersion:
    """A version and where its bytes are. ``digests``: of the ranks' blobs."""

    version: int
    plan: TransferPlan
    digests: list[str]
    blobs: Blobs = field(repr=False)

    def direct_load(self) -> DirectLoad:
        """Return the request that announces the buckets."""
        return DirectLoad(self.plan.plan_id, tuple(len(bucket) for bucket in self.plan.buckets))


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
        size = min(limit, max(map(bucket_bytes, self._buckets)))
        self._memory = [np.empty(size, dtype=np.uint8) for _ in range(2)]
        self._chunks = enumerate(
            chain.from_iterable(chunks_of(*numbered, size) for numbered in enumerate(self._buckets))
        )
        self._thread = ThreadPoolExecutor(1)
        self._next: Future[Sendable | None] | None = None
        self._nbytes = staged.plan.nbytes
        self._print = Fingerprint(0)  # of the current bucket
        self._sum = 0  # of all bytes

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
        """Return the checksum of all bytes; a direct transfer of the same bytes gives the same one."""
        return checksum(self._nbytes, self._sum)

    def _fetch(self) -> Sendable | None:
        number, chunk = next(self._chunks, (0, None))
        if chunk is None:
            return None
        if not chunk.start:
            self._print = Fingerprint(bucket_bytes(self._buckets[chunk.bucket]))
        data = self._memory[number % 2][: chunk.nbytes]
        self._blobs.fill(chunk, data, time.monotonic() + self._timeout)
        self._print.add(chunk.start, data)
        self._sum += int(data.view(np.int8).sum(dtype=np.int64))
        return Sendable(chunk, data, self._print.value() if chunk.last else None)
