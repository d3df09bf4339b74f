"""Fetcher: reads manifests and blobs of published versions from the trainers' sidecars."""

import http.client
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar
from urllib.parse import urlsplit

import torch

from grpo_worker.common.auth import headers
from grpo_worker.weightsync.agent import metrics
from grpo_worker.weightsync.protocol.digest import digest
from grpo_worker.weightsync.protocol.manifest import Manifest
from grpo_worker.weightsync.transport.nixl.agent import Offer
from grpo_worker.weightsync.transport.nixl.importer import Importer, ReadError

log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")
_PARALLEL = 8  # sources read in parallel


class FetchError(RuntimeError):
    """A source did not deliver; the message names its URL."""


class Fetcher:
    """Reads versions from the trainers' sidecars.

    The blobs are read into the same memory each time, because first writes to new memory take longer than
    receiving. ``timeout``: seconds for all blobs of a version. ``deltas``: first request the changes since
    the version that is held. ``importer``: reads blobs over NIXL; what it cannot read is fetched over HTTP.
    """

    def __init__(self, timeout: float, deltas: bool = False, importer: Importer | None = None) -> None:
        self._timeout = timeout
        self._importer = importer
        self._deltas = deltas
        if deltas:
            # numba takes a second to import; agents without deltas need not wait for it.
            from grpo_worker.weightsync.protocol.delta_codec import warm

            threading.Thread(target=warm, daemon=True).start()
        self._blobs: dict[int, torch.Tensor] = {}
        self._held: dict[int, Manifest] = {}  # of the complete blobs
        self.received = 0  # bytes that the last version took over the network

    def manifests(self, sources: dict[int, str], version: int) -> list[Manifest]:
        """Return all ranks' manifests. ``sources``: rank -> base URL. Raises FetchError if one is missing."""

        def fetch(rank: int) -> Manifest:
            url = _url(sources, version, rank, "json")
            with _Response(url, self._timeout) as response:
                return Manifest.from_json(response.read())

        return _each(fetch, sorted(sources))

    def blobs(self, sources: dict[int, str], manifests: Sequence[Manifest]) -> dict[int, torch.Tensor]:
        """Return the ranks' blobs, uint8 [blob_bytes], with their digests checked. Raises FetchError.

        The next call overwrites them.
        """
        deadline = time.monotonic() + self._timeout
        read = self._read_over_nixl(sources, manifests, deadline)

        def fetch(manifest: Manifest) -> int:
            url = _url(sources, manifest.version, manifest.rank, "bin")
            held = self._held.pop(manifest.rank, None)  # the blob is incomplete until it has been updated
            received = self._apply_delta(url, held, manifest, deadline) if held is not None else None
            if received is None:
                if manifest.rank not in read:
                    self._blobs[manifest.rank] = self._blob(url, manifest, deadline)
                received = manifest.blob_bytes
            self._held[manifest.rank] = manifest
            return received

        self.received = sum(_each(fetch, manifests))
        metrics.record_fetch(self.received)
        self._blobs = {m.rank: self._blobs[m.rank] for m in manifests}
        return self._blobs

    def forget(self) -> None:
        """Free the memory: later versions are received in another way."""
        self._blobs, self._held = {}, {}
        if self._importer is not None:
            self._importer.close()

    def _read_over_nixl(
        self, sources: dict[int, str], manifests: Sequence[Manifest], deadline: float
    ) -> set[int]:
        """Read the blobs that have changed; return the ranks whose blobs have the expected digest.

        Half of the remaining time is reserved for HTTP, in case that NIXL fails.
        """
        if self._importer is None:
            return set()
        held = {rank: manifest.digest for rank, manifest in self._held.items()}
        needed = {m.rank: m for m in manifests if m.blob_bytes and held.get(m.rank) != m.digest}
        if not needed:
            return set()
        for rank in needed:
            self._held.pop(rank, None)
        into = {rank: self._memory(manifest) for rank, manifest in needed.items()}
        now = time.monotonic()
        try:
            offers = _each(lambda rank: self.offer(sources, needed[rank]), needed)
            self._importer.read(dict(zip(needed, offers, strict=True)), into, now + (deadline - now) / 2)
        except (FetchError, ReadError) as error:
            log.warning("NIXL: %s; fetching the blobs over HTTP", error)
            metrics.record_nixl_read(succeeded=False)
            for rank in needed:
                self._blobs.pop(rank, None)
            return set()
        metrics.record_nixl_read(succeeded=True)
        self._blobs |= into
        return {rank for rank, m in needed.items() if digest(into[rank].numpy().data) == m.digest}

    def offer(self, sources: dict[int, str], manifest: Manifest) -> Offer:
        """Return the NIXL offer of the blob of ``manifest``. Raises FetchError."""
        url = _url(sources, manifest.version, manifest.rank, "nixl")
        with _Response(url, self._timeout) as response:
            return Offer(**json.loads(response.read()))

    def _memory(self, manifest: Manifest) -> torch.Tensor:
        """Return memory for a blob: that of the rank's last blob if the size is the same."""
        old = self._blobs.get(manifest.rank)
        size = manifest.blob_bytes
        return old if old is not None and len(old) == size else torch.empty(size, dtype=torch.uint8)

    def _apply_delta(self, url: str, held: Manifest, manifest: Manifest, deadline: float) -> int | None:
        """Update the held blob to ``manifest`` by a delta, and return the bytes received.

        None: there is no usable delta, and the whole blob must be fetched.
        """
        if held.digest == manifest.digest:
            return 0
        if not self._deltas or held.slices != manifest.slices:
            return None
        from grpo_worker.weightsync.protocol.delta_codec import DeltaError, apply

        blob = self._blobs[manifest.rank].numpy()
        delta_url = f"{url.removesuffix('bin')}delta?base={held.digest}"
        try:
            with _Response(delta_url, self._timeout) as response:
                new_digest, size = apply(blob, held.digest, partial(response.fill, deadline=deadline))
        except (FetchError, DeltaError) as error:
            log.info("fetching the whole blob: %s", error)
            return None
        return size if new_digest == manifest.digest else None

    def _blob(self, url: str, manifest: Manifest, deadline: float) -> torch.Tensor:
        data, size = self._memory(manifest), manifest.blob_bytes
        view = data.numpy().data
        with _Response(url, self._timeout) as response:
            length = response.read_into(view, deadline)
        if length != size or digest(view) != manifest.digest:
            raise FetchError(f"{url}: {length} bytes with another digest than the manifest's")
        return data


def _each(call: Callable[[T], R], over: Iterable[T]) -> list[R]:
    with ThreadPoolExecutor(_PARALLEL) as threads:
        return list(threads.map(call, over))


def _url(sources: dict[int, str], version: int, rank: int, suffix: str) -> str:
    return f"{sources[rank]}/v1/weights/{version}/{rank}.{suffix}"


class _Response:
    """An open GET request. http.client, unlike httpx, can receive into existing memory."""

    def __init__(self, url: str, timeout: float) -> None:
        self._url, parts = url, urlsplit(url)
        self._path = f"{parts.path}?{parts.query}" if parts.query else parts.path
        self._connection = http.client.HTTPConnection(parts.netloc, timeout=timeout)

    def __enter__(self) -> "_Response":
        try:
            self._connection.request("GET", self._path, headers=headers())
            self._response = self._connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise FetchError(f"{self._url}: {error!r}") from error
        if self._response.status != 200:
            status = self._response.status
            self._connection.close()
            raise FetchError(f"{self._url}: HTTP {status}")
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def read(self) -> bytes:
        """Return the whole body. Raises FetchError."""
        try:
            return self._response.read()
        except (OSError, http.client.HTTPException) as error:
            raise FetchError(f"{self._url}: {error!r}") from error

    def fill(self, to: memoryview, deadline: float) -> None:
        """Fill ``to`` with the next bytes of the body. Raises FetchError at ``deadline`` or at its end."""
        if (length := self._receive(to, deadline)) < len(to):
            raise FetchError(f"{self._url}: {length} more bytes, expected {len(to)}")

    def read_into(self, to: memoryview, deadline: float) -> int:
        """Receive the body into ``to`` if it has that length; return the length of the body.

        Raises FetchError at ``deadline`` (of time.monotonic()), even if bytes are still arriving.
        """
        if self._response.length != len(to):
            return self._response.length or 0
        return self._receive(to, deadline)

    def _receive(self, to: memoryview, deadline: float) -> int:
        body, length = self._response.fp, 0
        if body is None:
            return 0
        try:
            # readinto1 returns as soon as bytes have arrived; readinto would wait until ``to`` is full.
            while length < len(to) and (got := body.readinto1(to[length:])):
                length += got
                if time.monotonic() > deadline:
                    raise FetchError(f"{self._url}: {length} of {len(to)} bytes within the time limit")
        except (OSError, http.client.HTTPException) as error:
            raise FetchError(f"{self._url}: {error!r}") from error
        return length
