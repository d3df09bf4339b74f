"""An HTTP proxy in a thread of the test."""

import asyncio
import ssl
import threading
from typing import Any

import aiohttp
from aiohttp import web


class ThreadedProxy:
    """Plain HTTP on ``port`` of the loopback, which is free, until ``stop``. Subclasses answer requests.

    ``tls``: of the server behind; None: it speaks HTTP. ``largest``: bytes of a body. ``runner``: arguments
    of aiohttp's AppRunner.
    """

    def __init__(self, tls: ssl.SSLContext | None = None, largest: int = 2**26, **runner: Any) -> None:
        self._tls, self._largest, self._of_runner = tls, largest, runner
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()
        assert self._ready.wait(10)

    def stop(self) -> None:
        """End every request; one left open would be reported by another test's garbage collection."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(20)
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        raise NotImplementedError

    async def _close(self) -> None:
        await self._runner.cleanup()
        await self._session.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._start())
        self._ready.set()
        self._loop.run_forever()

    async def _start(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=self._tls or True, limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
        )
        app = web.Application(client_max_size=self._largest)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=1, **self._of_runner)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.port = int(self._runner.addresses[0][1])
