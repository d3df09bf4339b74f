"""Whole blobs over HTTP: progress limits a fetch, not its duration, and a failed fetch is continued."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from grpo_worker.weightsync.agent import whole_blobs
from grpo_worker.weightsync.agent.http_reader import FetchError
from grpo_worker.weightsync.agent.whole_blobs import WholeBlobs
from grpo_worker.weightsync.protocol.manifest import Manifest, rank_file
from grpo_worker.weightsync.trainer.publisher import publish
from support.engine_server import serve_app

TIMEOUT = 1.0
CHUNK = 1 << 10


class Source:
    """A trainer's agent that sends a chunk every ``pause`` seconds.

    It is silent from byte ``silent_from`` of a blob on. ``requested``: first byte of each request.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.pause, self.silent_from = 0.0, 1 << 60
        self.requested: list[int] = []
        self.url = serve_app(Starlette(routes=[Route("/v1/weights/{version:int}/{rank:int}.bin", self.blob)]))

    async def blob(self, request: Request) -> Response:
        file = rank_file(self.root, request.path_params["version"], request.path_params["rank"], "bin")
        data, wanted = file.read_bytes(), request.headers.get("range", "")
        first = int(wanted.removeprefix("bytes=").split("-")[0]) if wanted else 0
        self.requested.append(first)

        async def body() -> AsyncIterator[bytes]:
            for start in range(first, len(data), CHUNK):
                await asyncio.sleep(self.pause if start < self.silent_from else 2 * TIMEOUT)
                yield data[start : start + CHUNK]

        length = {"content-length": str(len(data) - first)}
        return StreamingResponse(body(), 206 if wanted else 200, length)

    def publish(self, version: int, rank: int = 0) -> Manifest:
        weight = torch.randn(8 * CHUNK // 2, generator=torch.Generator().manual_seed(version)).bfloat16()
        return publish(self.root, version, rank, 2, [(f"w{rank}", tuple(weight.shape), 0, 0, weight)])

    def bytes_of(self, manifest: Manifest) -> bytes:
        return rank_file(self.root, manifest.version, manifest.rank, "bin").read_bytes()


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    monkeypatch.setattr(whole_blobs, "CHUNK", CHUNK)
    return Source(tmp_path)


def test_a_slow_source_may_take_longer_than_the_timeout(source: Source) -> None:
    manifest = source.publish(1)
    source.pause = TIMEOUT / 5
    started = time.monotonic()
    blobs = WholeBlobs(TIMEOUT).fetch({0: source.url}, [manifest])
    assert time.monotonic() - started > 1.2 * TIMEOUT
    assert bytes(blobs[0]) == source.bytes_of(manifest)


def test_a_silent_source_is_named(source: Source) -> None:
    manifest = source.publish(1)
    source.silent_from = 3 * CHUNK
    named = rf"{source.url}/v1/weights/1/0\.bin: .* then none for 1 s"
    with pytest.raises(FetchError, match=named):
        WholeBlobs(TIMEOUT).fetch({0: source.url}, [manifest])


def test_a_fetch_continues_where_the_last_one_failed(source: Source) -> None:
    """Ranks whose blobs are complete are not asked again, the other from its first missing byte on."""
    manifests = [source.publish(1, 0), source.publish(1, 1)]
    whole, urls = WholeBlobs(TIMEOUT), {0: source.url, 1: source.url}
    whole.fetch(urls, manifests[:1])
    source.silent_from = 3 * CHUNK
    with pytest.raises(FetchError):
        whole.fetch(urls, manifests)
    source.silent_from = 1 << 60
    source.requested.clear()
    blobs = whole.fetch(urls, manifests)
    assert source.requested == [3 * CHUNK] and whole.received == 5 * CHUNK
    assert [bytes(blobs[m.rank]) for m in manifests] == [source.bytes_of(m) for m in manifests]


def test_a_fetch_of_other_bytes_starts_at_zero(source: Source) -> None:
    whole, urls = WholeBlobs(TIMEOUT), {0: source.url}
    source.silent_from = 3 * CHUNK
    with pytest.raises(FetchError):
        whole.fetch(urls, [source.publish(1)])
    source.silent_from = 1 << 60
    newer = source.publish(2)
    assert bytes(whole.fetch(urls, [newer])[0]) == source.bytes_of(newer)
    assert source.requested[-1] == 0


def test_damage_in_the_part_that_was_read_before_is_not_kept(source: Source) -> None:
    """The blob was damaged when its first part was read; the fetch after the refusal reads all of it."""
    manifest = source.publish(1)
    file = rank_file(source.root, 1, 0, "bin")
    right = file.read_bytes()
    whole, urls = WholeBlobs(TIMEOUT), {0: source.url}
    file.write_bytes(b"\xff" * CHUNK + right[CHUNK:])
    source.silent_from = 3 * CHUNK
    with pytest.raises(FetchError, match="none for"):
        whole.fetch(urls, [manifest])
    source.silent_from = 1 << 60
    file.write_bytes(right)
    with pytest.raises(FetchError, match="another digest"):
        whole.fetch(urls, [manifest])
    assert bytes(whole.fetch(urls, [manifest])[0]) == right and source.requested == [0, 3 * CHUNK, 0]
