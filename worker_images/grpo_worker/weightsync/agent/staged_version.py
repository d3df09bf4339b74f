"""Staged version: one that the trainers hold in host memory, streamed chunk by chunk to the engine."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np

from grpo_worker.common.weight_checksum import checksum
from grpo_worker.weightsync.agent.blobs import Blobs, Bytes
from grpo_worker.weightsync.agent.chunks import CHUNK, Chunk, Wanted, chunks_of
from grpo_worker.weightsync.agent.rank_parts import KeptBytes
from grpo_worker.weightsync.planner.rank_parts import Table
from grpo_worker.weightsync.protocol.direct_load import DirectLoad
from grpo_worker.weightsync.protocol.fingerprint import Fingerprint
from grpo_worker.weightsync.protocol.transfer_plan import TransferPlan, bucket_bytes


@dataclass(frozen=True, slots=True)
class StagedVersion:
    """A version and where its bytes are.

    ``digests``: of the ranks' blobs; empty for a peer's ranks. ``sources``: rank -> base URL, from which the
    agents of an engine's further hosts read it too. ``checksum``: of a peer's weights. ``stored``: folder in
    the checkpoint store instead, which all pods of an engine mount at the same place.
    """

    version: int
    plan: TransferPlan
    digests: list[str]
    blobs: Blobs = field(repr=False)
    sources: Mapping[int, str] = field(default_factory=dict)
    checksum: str = ""
    stored: str = ""

    def direct_load(self, record: bool, parts: bool, patience: float) -> DirectLoad:
        """Return the request that announces the buckets; see DirectLoad."""
        counts = tuple(len(bucket) for bucket in self.plan.buckets)
        return DirectLoad(self.plan.plan_id, counts, record, parts, patience)


@dataclass(frozen=True, slots=True)
class Sendable:
    """The bytes of a chunk.

    ``fingerprint``: of the bucket's bytes, with its last chunk, if the whole version is streamed.
    """

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
        self._plan = staged.plan
        self._timeout = timeout
        self._limit = min(limit, max(map(bucket_bytes, staged.plan.buckets)))
        self._memory = [np.empty(self._limit, dtype=np.uint8) for _ in range(2)]
        self._chunks = self._all_chunks(lambda _: None)
        self._kept: KeptBytes | None = None
        self._thread = ThreadPoolExecutor(1)
        self._next: Future[Sendable | None] | None = None
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

    def restrict(self, tables: Sequence[Table], counted: Table | None = None) -> None:
        """Stream only what the ranks keep whose regions are ``tables``, and what is read to verify it.

        ``counted``: regions whose bytes another host of the engine counts. Call it before the iteration,
        whose first chunk is the one that is already there. Raises FetchError.
        """
        assert self._next is not None, "used outside of its context"
        first = self._next.result()
        assert first is not None, "a version has bytes"
        kept = self._kept = KeptBytes(self._plan, tables, counted)
        kept.count(first.chunk, first.data)
        self._chunks = self._all_chunks(lambda index: kept.wanted(index, first.chunk))
        _, again = next(self._chunks)
        assert again.extents == first.chunk.extents, "the first chunk is read once"
        self._next = Future()
        self._next.set_result(replace(first, chunk=again, fingerprint=None))

    def __iter__(self) -> Iterator[Sendable]:
        """Yield the chunks. Raises FetchError."""
        assert self._next is not None, "used outside of its context"
        while (ready := self._next.result()) is not None:
            self._next = self._thread.submit(self._fetch)
            yield ready

    @property
    def nbytes(self) -> int:
        """Bytes of the version that were counted, once all chunks have been fetched."""
        return self._plan.nbytes if self._kept is None else self._kept.nbytes

    @property
    def total(self) -> int:
        """Sum of the bytes that were counted."""
        return self._sum if self._kept is None else self._kept.total

    def checksum(self) -> str:
        """Return the checksum of the bytes that were counted.

        A direct transfer of the same bytes gives the same one.
        """
        return checksum(self.nbytes, self.total)

    def _all_chunks(self, wanted: Callable[[int], Wanted | None]) -> Iterator[tuple[int, Chunk]]:
        """Return the numbered chunks of all buckets. ``wanted``: bytes of a bucket; None: all."""
        buckets = enumerate(self._plan.buckets)
        return enumerate(
            chain.from_iterable(chunks_of(i, bucket, self._limit, wanted(i)) for i, bucket in buckets)
        )

    def _fetch(self) -> Sendable | None:
        number, chunk = next(self._chunks, (0, None))
        if chunk is None:
            return None
        data = self._memory[number % 2][: chunk.nbytes]
        self._blobs.fill(chunk, data, time.monotonic() + self._timeout)
        if self._kept is not None:
            self._kept.count(chunk, data)
            return Sendable(chunk, data, None)
        if not chunk.start:
            self._print = Fingerprint(bucket_bytes(self._plan.buckets[chunk.bucket]))
        self._print.add(chunk.start, data)
        self._sum += int(data.view(np.int8).sum(dtype=np.int64))
        return Sendable(chunk, data, self._print.value() if chunk.last else None)
