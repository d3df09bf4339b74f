"""Rollout-side receive: pull the manifests and blobs of the trainer ranks."""

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
_AT_ONCE = 8  # sources that are read side by side


class FetchError(RuntimeError):
    """A source did not deliver; the message names it."""


class Fetcher:
    """Reads versions from the trainer-side agents, into the same memory each time: the first touch of
    fresh memory takes longer than receiving into it. ``timeout``: seconds for all blobs of a version,
    however the bytes trickle. ``deltas``: ask first for what changed since the version that is held.
    ``importer``: read the sources' memory by it, and over HTTP what it cannot."""

    def __init__(self, timeout: float, deltas: bool = False, importer: Importer | None = None) -> None:
        self._timeout = timeout
        self._importer = importer
        self._deltas = deltas
        if deltas:
            from grpo_worker.weightsync.protocol.delta_codec import (
                warm,  # numba takes a second that others need not wait
            )

            threading.Thread(target=warm, daemon=True).start()
        self._blobs: dict[int, torch.Tensor] = {}
        self._held: dict[int, Manifest] = {}  # what the blobs are, as long as they are whole
        self.received = 0  # bytes of the last version

    def manifests(self, sources: dict[int, str], version: int) -> list[Manifest]:
        """All ranks' manifests; ``sources``: rank -> base URL. Raises PullError when one cannot be had."""

        def one(rank: int) -> Manifest:
            url = _url(sources, version, rank, "json")
            with _Response(url, self._timeout) as response:
                return Manifest.from_json(response.read())

        return _each(one, sorted(sources))

    def blobs(self, sources: dict[int, str], manifests: Sequence[Manifest]) -> dict[int, torch.Tensor]:
        """The ranks' blobs, uint8 [blob_bytes], until the next call. The digest of each is checked.

        Raises PullError.
        """
        deadline = time.monotonic() + self._timeout
        read = self._read(sources, manifests, deadline)

        def one(manifest: Manifest) -> int:
            url = _url(sources, manifest.version, manifest.rank, "bin")
            held = self._held.pop(manifest.rank, None)  # until it is whole again
            received = self._changes(url, held, manifest, deadline) if held is not None else None
            if received is None:
                if manifest.rank not in read:
                    self._blobs[manifest.rank] = self._blob(url, manifest, deadline)
                received = manifest.blob_bytes
            self._held[manifest.rank] = manifest
            return received

        self.received = sum(_each(one, manifests))
        metrics.received(self.received)
        self._blobs = {m.rank: self._blobs[m.rank] for m in manifests}
        return self._blobs

    def forget(self) -> None:
        """Give the memory back: versions come another way now."""
        self._blobs, self._held = {}, {}
        if self._importer is not None:
            self._importer.close()

    def _read(self, sources: dict[int, str], manifests: Sequence[Manifest], deadline: float) -> set[int]:
        """Ranks whose blobs the importer has brought, as the manifests say, in half of the time."""
        if self._importer is None:
            return set()
        held = {rank: manifest.digest for rank, manifest in self._held.items()}
        wanted = {m.rank: m for m in manifests if m.blob_bytes and held.get(m.rank) != m.digest}
        if not wanted:
            return set()
        for rank in wanted:
            self._held.pop(rank, None)
        into = {rank: self._memory(manifest) for rank, manifest in wanted.items()}
        now = time.monotonic()
        try:
            offers = _each(lambda rank: self.offer(sources, wanted[rank]), wanted)
            self._importer.read(dict(zip(wanted, offers, strict=True)), into, now + (deadline - now) / 2)
        except (FetchError, ReadError) as error:
            log.warning("NIXL: %s; taking the blobs over HTTP", error)
            metrics.read_remotely(succeeded=False)
            for rank in wanted:
                self._blobs.pop(rank, None)
            return set()
        metrics.read_remotely(succeeded=True)
        self._blobs |= into
        return {rank for rank, m in wanted.items() if digest(into[rank].numpy().data) == m.digest}

    def offer(self, sources: dict[int, str], manifest: Manifest) -> Offer:
        """Where the rank's agent has the blob of ``manifest``. Raises PullError."""
        url = _url(sources, manifest.version, manifest.rank, "nixl")
        with _Response(url, self._timeout) as response:
            return Offer(**json.loads(response.read()))

    def _memory(self, manifest: Manifest) -> torch.Tensor:
        """Where the rank's blob was, if the new one fits."""
        old = self._blobs.get(manifest.rank)
        size = manifest.blob_bytes
        return old if old is not None and len(old) == size else torch.empty(size, dtype=torch.uint8)

    def _changes(self, url: str, held: Manifest, manifest: Manifest, deadline: float) -> int | None:
        """Bring the held blob to ``manifest`` by what changed; bytes received. None: take the whole blob."""
        if held.digest == manifest.digest:
            return 0
        if not self._deltas or held.slices != manifest.slices:
            return None
        from grpo_worker.weightsync.protocol.delta_codec import DeltaError, apply

        blob = self._blobs[manifest.rank].numpy()
        asked = f"{url.removesuffix('bin')}delta?base={held.digest}"
        try:
            with _Response(asked, self._timeout) as response:
                found, size = apply(blob, held.digest, partial(response.fill, deadline=deadline))
        except (FetchError, DeltaError) as error:
            log.info("taking the whole blob: %s", error)
            return None
        return size if found == manifest.digest else None

    def _blob(self, url: str, manifest: Manifest, deadline: float) -> torch.Tensor:
        data, size = self._memory(manifest), manifest.blob_bytes
        view = data.numpy().data
        with _Response(url, self._timeout) as response:
            length = response.read_into(view, deadline)
        if length != size or digest(view) != manifest.digest:
            raise FetchError(f"{url}: {length} bytes with another digest than the manifest's")
        return data


def _each(call: Callable[[T], R], over: Iterable[T]) -> list[R]:
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        return list(threads.map(call, over))


def _url(sources: dict[int, str], version: int, rank: int, suffix: str) -> str:
    return f"{sources[rank]}/v1/weights/{version}/{rank}.{suffix}"


class _Response:
    """An open GET. http.client, unlike httpx, can receive into memory that is there."""

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
        """The whole body."""
        try:
            return self._response.read()
        except (OSError, http.client.HTTPException) as error:
            raise FetchError(f"{self._url}: {error!r}") from error

    def fill(self, to: memoryview, deadline: float) -> None:
        """Receive the next bytes of the body. Raises PullError after ``deadline``, and at the body's end."""
        if (length := self._receive(to, deadline)) < len(to):
            raise FetchError(f"{self._url}: {length} more bytes, expected {len(to)}")

    def read_into(self, to: memoryview, deadline: float) -> int:
        """Receive the body in place, if it fits exactly; how many bytes it has.

        Raises PullError after ``deadline`` (of time.monotonic()), also while bytes trickle.
        """
        if self._response.length != len(to):
            return self._response.length or 0
        return self._receive(to, deadline)

    def _receive(self, to: memoryview, deadline: float) -> int:
        body, length = self._response.fp, 0
        if body is None:
            return 0
        try:
            # readinto1 comes back with what is there; readinto would wait until ``to`` is full.
            while length < len(to) and (got := body.readinto1(to[length:])):
                length += got
                if time.monotonic() > deadline:
                    raise FetchError(f"{self._url}: {length} of {len(to)} bytes within the time limit")
        except (OSError, http.client.HTTPException) as error:
            raise FetchError(f"{self._url}: {error!r}") from error
        return length
