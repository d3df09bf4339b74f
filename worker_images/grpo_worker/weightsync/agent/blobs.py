"""Blobs of a version: read by ranges from sidecars or files, or held in this process's memory."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from grpo_worker.weightsync.agent.chunks import Chunk, Extent
from grpo_worker.weightsync.agent.http_reader import FetchError
from grpo_worker.weightsync.protocol.digest import PIECE, SIZE
from grpo_worker.weightsync.protocol.manifest import Manifest

Bytes = npt.NDArray[np.uint8]

_PARALLEL = 8  # ranges read in parallel
_STEP = 1 << 20  # bytes hashed while they are in a core's cache
_RUN = 8 << 20  # bytes of adjacent extents that one request reads
_GAP = 64 << 10  # bytes between extents that are read in vain rather than by another request


class Blobs(Protocol):
    """The ranks' blobs of one version. ``local``: they are in this process's memory."""

    local: bool

    def fill(self, chunk: Chunk, into: Bytes, deadline: float) -> None:
        """Write a chunk into ``into`` (uint8 [bytes of the chunk]); chunks come in order.

        ``deadline``: of time.monotonic(). Raises FetchError for bytes that are missing or have another digest
        than the manifest's.
        """
        ...

    def close(self) -> None:
        """End threads and connections; the next ``fill`` opens them again."""
        ...


class LocalBlobs:
    """Whole blobs, uint8 [blob_bytes], whose digests were checked, by rank."""

    local = True

    def __init__(self, blobs: Mapping[int, Bytes]) -> None:
        self._blobs = blobs

    def fill(self, chunk: Chunk, into: Bytes, deadline: float) -> None:
        for extent in chunk.extents:
            data = self._blobs[extent.rank][extent.start : extent.start + extent.nbytes]
            scatter(extent, 0, data, into)

    def close(self) -> None: ...


class Body(Protocol):
    """Bytes that are read in order; see HttpReader."""

    def fill(self, to: memoryview, deadline: float) -> None: ...


class RangeReader(Protocol):
    """Opens ranges of bytes at a URL or in a file; see HttpReader and FileReader."""

    def get(self, url: str, part: tuple[int, int]) -> AbstractContextManager[Body]: ...


class DamageError(FetchError):
    """Bytes have another digest than the manifest's."""


class RangedBlobs:
    """Blobs that stay where they are; ``urls``: of the ranks' blobs."""

    local = False

    def __init__(self, reader: RangeReader, urls: Mapping[int, str], manifests: Sequence[Manifest]) -> None:
        self._reader = reader
        self._urls = urls
        self._digests = {manifest.rank: manifest.digests_of_slices() for manifest in manifests}
        self._sizes = {m.rank: {part.start: part.nbytes for part in m.slices} for m in manifests}
        self._lock = threading.Lock()
        # Of pieces that are not complete, by rank and the byte of the blob at which they go on.
        self._checks: dict[tuple[int, int], _SliceCheck] = {}
        self._received = 0
        self._threads: ThreadPoolExecutor | None = None

    @property
    def received(self) -> int:
        """Bytes that were read so far."""
        return self._received

    def fill(self, chunk: Chunk, into: Bytes, deadline: float) -> None:
        if not chunk.start and not chunk.bucket:
            self._checks = {}  # an earlier attempt ended within a slice
        if self._threads is None:  # each keeps its connections from chunk to chunk
            self._threads = ThreadPoolExecutor(_PARALLEL)
        runs = [self._threads.submit(self._read, run, into, deadline) for run in runs_of(chunk.extents)]
        wait(runs)  # none may write after this call
        for run in runs:
            run.result()

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None

    def _read(self, run: Sequence[Extent], into: Bytes, deadline: float) -> None:
        rank, first, last = run[0].rank, run[0].start, run[-1].start + run[-1].nbytes
        with self._reader.get(self._urls[rank], (first, last)) as body:
            at = first
            for extent in run:
                if extent.start > at:
                    body.fill(memoryview(bytearray(extent.start - at)), deadline)
                self._read_extent(extent, body, into, deadline)
                at = extent.start + extent.nbytes
        with self._lock:
            self._received += last - first

    def _read_extent(self, extent: Extent, body: Body, into: Bytes, deadline: float) -> None:
        check = self._check(extent)
        contiguous = extent.row == extent.stride
        step = _STEP if contiguous else max(extent.row, _STEP // extent.row * extent.row)
        scratch = np.empty(0 if contiguous else min(step, extent.nbytes), dtype=np.uint8)
        for offset in range(0, extent.nbytes, step):
            size = min(step, extent.nbytes - offset)
            place = extent.at + offset
            data = into[place : place + size] if contiguous else scratch[:size]
            body.fill(data.data, deadline)
            check.update(data.data)
            if not contiguous:
                scatter(extent, offset, data, into)
        if not check.complete:
            self._checks[extent.rank, extent.start + extent.nbytes] = check

    def _check(self, extent: Extent) -> "_SliceCheck":
        """Return the check that an extent continues, or a new one: it then begins at a piece of its slice."""
        started = self._checks.pop((extent.rank, extent.start), None)
        if started is not None:
            return started
        rank, start = extent.rank, extent.slice_start
        where = f"{self._urls[rank]}, slice at byte {start}"
        return _SliceCheck(self._digests[rank][start], self._sizes[rank][start], where, extent.start - start)


class _SliceCheck:
    """Compares a slice's bytes, in order from byte ``seen`` on, with the digests of its pieces."""

    def __init__(self, digests: bytes, nbytes: int, where: str, seen: int) -> None:
        assert seen % PIECE == 0, f"{where}: byte {seen} is within a piece, which cannot be verified"
        self._digests = digests
        self._nbytes = nbytes
        self._where = where
        self._hasher = xxhash.xxh3_128()
        self._seen = seen

    @property
    def complete(self) -> bool:
        """Whether all bytes so far are verified; other pieces of the slice may not be wanted."""
        return self._seen == self._nbytes or self._seen % PIECE == 0

    def update(self, data: memoryview) -> None:
        """Take the next bytes. Raises FetchError after a piece that has another digest."""
        while len(data):
            piece = self._seen // PIECE
            end = min((piece + 1) * PIECE, self._nbytes)
            part, data = data[: end - self._seen], data[end - self._seen :]
            self._hasher.update(part)
            self._seen += len(part)
            if self._seen == end:
                if self._hasher.digest() != self._digests[piece * SIZE : (piece + 1) * SIZE]:
                    raise DamageError(f"{self._where}: another digest than the manifest's")
                self._hasher.reset()


def runs_of(extents: Sequence[Extent], most: int = _RUN) -> Iterator[list[Extent]]:
    """Group extents that one request reads: of one rank, close together, and at most ``most`` bytes.

    A larger extent is read alone.
    """
    run: list[Extent] = []
    for extent in sorted(extents, key=lambda e: (e.rank, e.start)):
        if run:
            end = run[-1].start + run[-1].nbytes
            near = extent.rank == run[0].rank and extent.start - end <= _GAP
            if not near or extent.start + extent.nbytes - run[0].start > most:
                yield run
                run = []
        run.append(extent)
    if run:
        yield run


def scatter(extent: Extent, offset: int, data: Bytes, into: Bytes) -> None:
    """Copy whole rows of an extent, from its byte ``offset`` on, to their places in the chunk."""
    if extent.row == extent.stride:
        into[extent.at + offset : extent.at + offset + len(data)] = data
        return
    rows = len(data) // extent.row
    first = extent.at + offset // extent.row * extent.stride
    places = np.lib.stride_tricks.as_strided(into[first:], (rows, extent.row), (extent.stride, 1))
    places[...] = data.reshape(rows, extent.row)
