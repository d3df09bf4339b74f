"""A real S3 server (versitygw, objects are plain files) and a proxy before it that fails on demand."""

import asyncio
import os
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import aiohttp
import httpx
from aiohttp import web
from yarl import URL

from grpo_devcluster.gobuild import binary, build_all
from grpo_operator.api.v1alpha1.checkpoint import StoreSpec
from grpo_worker.common.store_path import JobFolder, StorePath
from support.engine_server import free_port

KEYS = {"AWS_ACCESS_KEY_ID": "grpo", "AWS_SECRET_ACCESS_KEY": "a-secret-of-tests"}
BUCKET = "runs"
_HOP_BY_HOP = {"connection", "transfer-encoding", "content-length", "keep-alive"}
_SLOW_DOWN = """<?xml version="1.0" encoding="UTF-8"?>
<Error><Code>{code}</Code><Message>injected</Message><RequestId>1</RequestId></Error>"""


class S3Server:
    """The server's process. ``files``: folder of the bucket, where each object is a file."""

    def __init__(self, folder: Path) -> None:
        build_all(["versitygw"])
        self.files, metadata = folder / "data" / BUCKET, folder / "metadata"
        for made in (self.files, metadata):
            made.mkdir(parents=True)
        self.port = free_port()
        keys = {
            "ROOT_ACCESS_KEY": KEYS["AWS_ACCESS_KEY_ID"],
            "ROOT_SECRET_KEY": KEYS["AWS_SECRET_ACCESS_KEY"],
        }
        self._command = [
            str(binary("versitygw")), "--quiet", "--keep-alive", "--port", f"127.0.0.1:{self.port}",
            "posix", "--sidecar", str(metadata), str(folder / "data"),
        ]  # fmt: skip
        self._environment = os.environ | keys
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(
            self._command, env=self._environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                httpx.get(f"http://127.0.0.1:{self.port}", timeout=1)
            except httpx.HTTPError:
                assert self._process.poll() is None, "the S3 server has ended"
                time.sleep(0.05)
            else:
                return
        raise AssertionError("the S3 server does not answer")

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def spec(self, port: int | None = None) -> StoreSpec:
        endpoint = f"http://127.0.0.1:{port or self.port}"
        return StoreSpec(uri=f"s3://{BUCKET}/jobs", endpoint=endpoint, region="us-east-1", secret="keys")

    def folder(self, name: str) -> StorePath:
        """Return the folder of a job in the bucket."""
        return JobFolder.of(self.spec(), Path("/store", name)).store

    def objects(self, folder: str) -> list[str]:
        """Return the names of the objects of a job, relative to its folder."""
        root = self.files / "jobs" / folder
        return sorted(str(file.relative_to(root)) for file in root.rglob("*") if file.is_file())


@contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    server = S3Server(folder)
    try:
        with patch.dict(os.environ, KEYS):
            yield server
    finally:
        server.stop()


class FaultyS3:
    """Proxy whose faults are chosen for each request: a status, "cut" in the middle of its body, or None.

    ``choose``: gets the request and how many requests came before. ``fired``: faults that happened, by kind.
    """

    def __init__(self, server: S3Server, choose: Callable[[web.Request, int], int | str | None]) -> None:
        self._to = f"http://127.0.0.1:{server.port}"
        self.choose = choose
        self.fired: Counter[str] = Counter()
        self._requests = 0
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()
        assert self._ready.wait(10)

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(20)
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _close(self) -> None:
        await self._runner.cleanup()
        await self._session.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._start())
        self._ready.set()
        self._loop.run_forever()

    async def _start(self) -> None:
        self._session = aiohttp.ClientSession(auto_decompress=False)
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=1, auto_decompress=False)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = int(self._runner.addresses[0][1])

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        fault = self.choose(request, self._requests)
        self._requests += 1
        assert request.transport is not None
        if fault == "cut":
            await request.content.read(1 << 16)
            self.fired["cut"] += 1
            request.transport.abort()
            return web.Response(status=499)
        body = await request.read()
        if isinstance(fault, int):
            self.fired[str(fault)] += 1
            code = "SlowDown" if fault == 503 else "InternalError"
            return web.Response(
                status=fault, text=_SLOW_DOWN.format(code=code), content_type="application/xml"
            )
        return await self._forward(request, body)

    async def _forward(self, request: web.Request, body: bytes) -> web.StreamResponse:
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _HOP_BY_HOP}
        url = URL(self._to + request.raw_path, encoded=True)
        async with self._session.request(request.method, url, headers=headers, data=body) as answer:
            kept = {k: v for k, v in answer.headers.items() if k.lower() not in _HOP_BY_HOP}
            content = await answer.read()
            if request.method == "HEAD":
                kept["Content-Length"] = answer.headers.get("Content-Length", "0")
            return web.Response(status=answer.status, headers=kept, body=content or None)


@contextmanager
def faulty(server: S3Server, choose: Callable[[web.Request, int], int | str | None]) -> Iterator[FaultyS3]:
    proxy = FaultyS3(server, choose)
    try:
        yield proxy
    finally:
        proxy.stop()
