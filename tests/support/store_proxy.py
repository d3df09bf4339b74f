"""Proxy before the server of an object store that fails on demand."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from aiohttp import web
from yarl import URL

from support.object_store import ObjectServer
from support.threaded_proxy import ThreadedProxy

Choice = Callable[[web.Request, int], int | str | None]
_HOP_BY_HOP = {"connection", "transfer-encoding", "content-length", "keep-alive"}


class StoreProxy(ThreadedProxy):
    """Proxy whose faults are chosen for each request: a status, "cut", "lost", or None.

    "cut": the connection ends in the middle of the request. "lost": the server does what is asked, and the
    connection ends before the answer. ``choose``: gets the request and how many requests came before.
    ``fired``: faults that happened, by kind.
    """

    def __init__(self, server: ObjectServer, choose: Choice) -> None:
        self._server = server
        self.choose = choose
        self.fired: Counter[str] = Counter()
        self._requests = 0
        super().__init__(largest=2**30, auto_decompress=False)

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
            return self._server.answer(fault)
        answer = await self._forward(request, body)
        if fault == "lost":
            self.fired["lost"] += 1
            request.transport.abort()
        return answer

    async def _forward(self, request: web.Request, body: bytes) -> web.StreamResponse:
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _HOP_BY_HOP}
        url = URL(f"http://127.0.0.1:{self._server.port}{request.raw_path}", encoded=True)
        async with self._session.request(
            request.method, url, headers=headers, data=body, allow_redirects=False
        ) as answer:
            kept = {k: v for k, v in answer.headers.items() if k.lower() not in _HOP_BY_HOP}
            content = await answer.read()
            if request.method == "HEAD":
                kept["Content-Length"] = answer.headers.get("Content-Length", "0")
            return web.Response(status=answer.status, headers=kept, body=content or None)


@contextmanager
def faulty(server: ObjectServer, choose: Choice) -> Iterator[StoreProxy]:
    proxy = StoreProxy(server, choose)
    try:
        yield proxy
    finally:
        proxy.stop()
