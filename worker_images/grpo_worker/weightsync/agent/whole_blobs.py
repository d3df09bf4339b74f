"""Whole blobs in this process's memory: for deltas, which change the version before, and for NIXL."""

import json
import logging
import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from grpo_worker.common.known_fields import known
from grpo_worker.weightsync.agent import metrics
from grpo_worker.weightsync.agent.blobs import Bytes
from grpo_worker.weightsync.agent.chunks import CHUNK
from grpo_worker.weightsync.agent.http_reader import FetchError, HttpReader
from grpo_worker.weightsync.agent.sources import each, url_of
from grpo_worker.weightsync.protocol.digest import piece_digests
from grpo_worker.weightsync.protocol.manifest import Manifest
from grpo_worker.weightsync.transport.nixl.agent import Offer
from grpo_worker.weightsync.transport.nixl.importer import Importer, ReadError

log = logging.getLogger(__name__)


class WholeBlobs:
    """Fetches the ranks' blobs.

    The blobs are read into the same memory each time, because first writes to new memory take longer than
    receiving. ``timeout``: seconds without a byte of a source, and over NIXL without a part of any blob.
    ``deltas``: first request the changes since the version that is held. ``importer``: reads blobs over NIXL;
    what it cannot read is fetched over HTTP.

    A fetch that fails keeps what it has read over HTTP, and the next one of the same bytes continues there.
    """

    def __init__(self, timeout: float, deltas: bool = False, importer: Importer | None = None) -> None:
        self._timeout = timeout
        self._reader = HttpReader(timeout)
        self._importer = importer
        self._deltas = deltas
        if deltas:
            # numba takes a second to import; agents without deltas need not wait for it.
            from grpo_worker.weightsync.protocol.delta_codec import warm

            threading.Thread(target=warm, daemon=True).start()
        self._blobs: dict[int, Bytes] = {}
        self._held: dict[int, Manifest] = {}  # of the complete blobs
        self._begun: dict[int, _Begun] = {}  # of the blobs that are incomplete
        self.received = 0  # bytes that the last version took over the network

    def fetch(self, sources: Mapping[int, str], manifests: Sequence[Manifest]) -> dict[int, Bytes]:
        """Return the ranks' blobs, uint8 [blob_bytes], with their digests checked. Raises FetchError.

        The next call overwrites them.
        """
        read = self._read_over_nixl(sources, manifests)

        def fetch(manifest: Manifest) -> int:
            url = url_of(sources, manifest.version, manifest.rank, "bin")
            held = self._held.pop(manifest.rank, None)  # the blob is incomplete until it has been updated
            received = self._apply_delta(url, held, manifest) if held is not None else None
            if received is None:
                received = manifest.blob_bytes if manifest.rank in read else self._read_blob(url, manifest)
            self._held[manifest.rank] = manifest
            return received

        self.received = sum(each(fetch, manifests))
        self._blobs = {m.rank: self._blobs[m.rank] for m in manifests}
        return self._blobs

    def forget(self) -> None:
        """Free the memory: later versions are received in another way."""
        self._blobs, self._held, self._begun = {}, {}, {}
        if self._importer is not None:
            self._importer.close()

    def _read_over_nixl(self, sources: Mapping[int, str], manifests: Sequence[Manifest]) -> set[int]:
        """Read the blobs that have changed; return the ranks whose blobs have the expected digest."""
        if self._importer is None:
            return set()
        held = {rank: manifest.digest for rank, manifest in self._held.items()}
        needed = {m.rank: m for m in manifests if m.blob_bytes and held.get(m.rank) != m.digest}
        if not needed:
            return set()
        for rank in needed:
            self._held.pop(rank, None)
            self._begun.pop(rank, None)
        into = {rank: self._memory(manifest) for rank, manifest in needed.items()}
        try:
            offers = each(lambda rank: self.offer(sources, needed[rank]), needed)
            self._importer.read(dict(zip(needed, offers, strict=True)), into, self._timeout)
        except (FetchError, ReadError) as error:
            log.warning("NIXL: %s; fetching the blobs over HTTP", error)
            metrics.record_nixl_read(succeeded=False)
            for rank in needed:
                self._blobs.pop(rank, None)
            return set()
        metrics.record_nixl_read(succeeded=True)
        self._blobs |= into
        return {rank for rank, manifest in needed.items() if _intact(into[rank], manifest)}

    def offer(self, sources: Mapping[int, str], manifest: Manifest) -> Offer:
        """Return the NIXL offer of the blob of ``manifest``. Raises FetchError."""
        with self._reader.get(url_of(sources, manifest.version, manifest.rank, "nixl")) as body:
            return Offer(**known(Offer, json.loads(body.read())))

    def _memory(self, manifest: Manifest) -> Bytes:
        """Return memory for a blob: that of the rank's last blob if the size is the same."""
        old = self._blobs.get(manifest.rank)
        size = manifest.blob_bytes
        return old if old is not None and len(old) == size else np.empty(size, dtype=np.uint8)

    def _apply_delta(self, url: str, held: Manifest, manifest: Manifest) -> int | None:
        """Update the held blob to ``manifest`` by a delta, and return the bytes received.

        None: there is no usable delta, and the whole blob must be fetched.
        """
        if held.digest == manifest.digest:
            return 0
        if not self._deltas or held.slices != manifest.slices:
            return None
        from grpo_worker.weightsync.protocol.delta_codec import DeltaError, apply

        blob, pieces = self._blobs[manifest.rank], list(manifest.pieces)
        delta_url = f"{url.removesuffix('bin')}delta?base={held.digest}"
        try:
            with self._reader.get(delta_url) as body:
                digests, size = apply(blob, held.digest, pieces, body.fill)
        except (FetchError, DeltaError) as error:
            log.info("fetching the whole blob: %s", error)
            return None
        return size if digests == manifest.piece_digests else None

    def _read_blob(self, url: str, manifest: Manifest) -> int:
        """Read a blob, or what an earlier call has not read of it; return the bytes received."""
        rank, size, begun = manifest.rank, manifest.blob_bytes, self._begun.pop(manifest.rank, None)
        first = begun.nbytes if begun is not None and begun.digest == manifest.digest else 0
        data = self._blobs[rank] = self._memory(manifest)
        with self._reader.get(url, (first, size) if first else None) as body:
            if body.length != size - first:
                raise FetchError(f"{url}: {body.length} bytes, expected {size - first}")
            for start in range(first, size, CHUNK):
                self._begun[rank] = _Begun(manifest.digest, start)
                body.fill(data.data[start : start + CHUNK])
        self._begun.pop(rank, None)
        if not _intact(data, manifest):
            raise FetchError(f"{url}: another digest than the manifest's")
        return size - first


class _Begun(NamedTuple):
    """The first ``nbytes`` bytes of the blob of ``digest`` are in memory."""

    digest: str
    nbytes: int


def _intact(data: Bytes, manifest: Manifest) -> bool:
    return piece_digests(data.data, manifest.pieces) == manifest.piece_digests
