"""A proxy before the API server that fails on demand: refuses, delays, answers errors, cuts watches."""

import asyncio
import base64
import contextlib
import ssl
import tempfile
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from aiohttp import web

from support.threaded_proxy import ThreadedProxy

_HOP_BY_HOP = {"connection", "transfer-encoding", "content-length", "content-encoding", "host"}


class ApiProxy(ThreadedProxy):
    """Plain HTTP on a port of its own; its faults are switched from the test's thread.

    A client of a kubeconfig with a token sends it along; others are the user of the certificate.
    """

    def __init__(self, kubeconfig: Path, directory: Path) -> None:
        config = yaml.safe_load(kubeconfig.read_text())
        self._server = config["clusters"][0]["cluster"]["server"]
        self._watches: set[asyncio.Task[Any]] = set()
        self.down = False
        self.repeat_events = False
        self.write_codes: deque[int] = deque()  # answers to the next writes
        self.write_delays: dict[str, float] = {}  # seconds by part of the path, as of a webhook that hangs
        self.forbidden: set[str] = set()  # last parts of the paths that are answered with 403
        self.before_write: Callable[[int], None] | None = None  # called with the write's number
        self.writes = 0
        self.paths: list[str] = []  # of all requests, with their queries
        self.refused = self.failed = self.cut = self.repeated = self.delayed = 0  # faults that happened
        self.kubeconfig = directory / "proxy.kubeconfig"
        super().__init__(_client_context(config))
        _point_at(config, self.port, self.kubeconfig)

    def cut_watches(self) -> None:
        """End every open watch in the middle of its stream."""
        self._loop.call_soon_threadsafe(self._cut)

    async def _close(self) -> None:
        watches = list(self._watches)  # those of clients that were killed stay open otherwise
        self._cut()
        await asyncio.gather(*watches, return_exceptions=True)
        await super()._close()

    def _cut(self) -> None:
        for task in list(self._watches):
            self.cut += 1
            task.cancel()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.paths.append(request.path_qs)
        if self.down:
            self.refused += 1
            assert request.transport is not None
            request.transport.abort()
            raise ConnectionResetError
        if request.path.rsplit("/", 1)[1] in self.forbidden:
            return _status(403)
        if request.method != "GET":
            await self._delay(request.path)
        # The leader renews its lease all the time: faults of writes are meant for the others.
        writes = request.method in ("PATCH", "POST") and "/leases" not in request.path
        if writes and self.write_codes:
            self.failed += 1
            return _status(self.write_codes.popleft())
        if writes:
            self.writes += 1
            if self.before_write is not None:
                self.before_write(self.writes)
        with contextlib.suppress(ConnectionResetError):  # the operator hung up, or was killed
            return await self._forward(request)
        return web.Response(status=499)

    async def _delay(self, path: str) -> None:
        """Hold a write while its path has a delay; a test that ends removes the delays."""
        began, part = self._loop.time(), next((part for part in self.write_delays if part in path), "")
        self.delayed += bool(part)
        while part and self._loop.time() - began < self.write_delays.get(part, 0):  # noqa: ASYNC110
            await asyncio.sleep(0.1)

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _HOP_BY_HOP}
        url = self._server + str(request.rel_url)
        async with self._session.request(
            request.method, url, headers=headers, data=await request.read() or None
        ) as answer:
            kept = {k: v for k, v in answer.headers.items() if k.lower() not in _HOP_BY_HOP}
            encoding = answer.headers.get("Content-Encoding")
            if encoding:
                kept["Content-Encoding"] = encoding
            response = web.StreamResponse(status=answer.status, headers=kept)
            await response.prepare(request)
            if "watch=true" in request.query_string:
                await self._stream(answer, response)
            else:
                await response.write(await answer.read())
            return response

    async def _stream(self, answer: aiohttp.ClientResponse, response: web.StreamResponse) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._watches.add(task)
        before = b""
        try:
            async for line in answer.content:
                await response.write(line)
                if self.repeat_events and before:
                    self.repeated += 2
                    await response.write(before + line)  # a stale event, then the newest again
                before = line
        finally:
            self._watches.discard(task)


def _status(code: int) -> web.Response:
    body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": "Injected"}
    return web.json_response(body, status=code, headers={"Retry-After": "1"} if code == 429 else {})


def _client_context(config: dict[str, Any]) -> ssl.SSLContext:
    authority = base64.b64decode(config["clusters"][0]["cluster"]["certificate-authority-data"]).decode()
    context = ssl.create_default_context(cadata=authority)
    user = config["users"][0]["user"]
    if "token" in user:
        return context
    with tempfile.NamedTemporaryFile() as pair:
        for key in ("client-certificate-data", "client-key-data"):
            pair.write(base64.b64decode(user[key]) + b"\n")
        pair.flush()
        context.load_cert_chain(pair.name)
    return context


def _point_at(config: dict[str, Any], port: int, target: Path) -> None:
    cluster = {"name": "proxy", "cluster": {"server": f"http://127.0.0.1:{port}"}}
    context = {"name": "proxy", "context": {"cluster": "proxy", "user": "proxy"}}
    made = config | {"clusters": [cluster], "contexts": [context], "current-context": "proxy"}
    user = config["users"][0]["user"]
    made["users"] = [{"name": "proxy", "user": {key: user[key] for key in user if key == "token"}}]
    target.write_text(yaml.safe_dump(made))
