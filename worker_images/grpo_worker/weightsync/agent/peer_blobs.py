"""Blobs that lie in the ranks of a serving engine, read through its agent."""

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace

import numpy as np
import xxhash

from grpo_worker.weightsync.agent.blobs import Bytes, runs_of, scatter
from grpo_worker.weightsync.agent.chunks import Chunk, Extent
from grpo_worker.weightsync.agent.http_reader import FetchError, HttpReader
from grpo_worker.weightsync.protocol.region_stream import MOST

_PARALLEL = 8  # ranges read in parallel
DIGEST = "x-digest"  # header with the digest of a range, computed by the rank that read it


class PeerBlobs:
    """Blobs of a peer's ranks. ``urls``: of them, by rank. ``cancelled``: whether the reading must end."""

    local = False

    def __init__(self, reader: HttpReader, urls: Mapping[int, str], cancelled: Callable[[], bool]) -> None:
        self._reader = reader
        self._urls = urls
        self._cancelled = cancelled
        self._threads: ThreadPoolExecutor | None = None
        self.received = 0  # bytes that were read so far

    def fill(self, chunk: Chunk, into: Bytes, deadline: float) -> None:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_PARALLEL)
        extents = [piece for extent in chunk.extents for piece in _cut(extent)]
        reads = [self._threads.submit(self._read, run, into, deadline) for run in runs_of(extents, MOST)]
        wait(reads)  # none may write after this call
        self.received += sum(read.result() for read in reads)

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None

    def _read(self, run: list[Extent], into: Bytes, deadline: float) -> int:
        """Read the range of ``run`` and write its extents to their places; return the bytes read."""
        if self._cancelled():
            raise FetchError("a call of the job ends the reading from a peer")
        url, first = self._urls[run[0].rank], run[0].start
        data = np.empty(run[-1].start + run[-1].nbytes - first, dtype=np.uint8)
        if time.monotonic() > deadline:
            raise FetchError(f"{url}: not within the time limit")
        with self._reader.get(url, (first, first + len(data))) as body:
            digest = body.header(DIGEST)
            body.fill(data.data, deadline)
        if xxhash.xxh3_128_hexdigest(data.data) != digest:
            raise FetchError(f"{url}, byte {first}: other bytes than the peer's rank has read")
        for extent in run:
            scatter(extent, 0, data[extent.start - first :][: extent.nbytes], into)
        return len(data)


def _cut(extent: Extent) -> Iterator[Extent]:
    """Cut an extent into pieces of at most MOST bytes; between its rows if they have gaps in the chunk."""
    if extent.row == extent.stride:
        for offset in range(0, extent.nbytes, MOST):
            size, at = min(MOST, extent.nbytes - offset), extent.at + offset
            yield replace(extent, start=extent.start + offset, nbytes=size, at=at, row=size, stride=size)
        return
    rows, most = extent.nbytes // extent.row, MOST // extent.row
    if not most:
        for row in range(rows):
            start, at = extent.start + row * extent.row, extent.at + row * extent.stride
            yield from _cut(replace(extent, start=start, nbytes=extent.row, at=at, stride=extent.row))
        return
    for row in range(0, rows, most):
        size = min(most, rows - row) * extent.row
        start, at = extent.start + row * extent.row, extent.at + row * extent.stride
        yield replace(extent, start=start, nbytes=size, at=at)
