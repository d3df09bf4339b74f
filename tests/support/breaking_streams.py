"""Connections that break while an engine answers."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx

from grpo_worker.rollout.connections import Connections


class BreakingStreams(httpx.AsyncBaseTransport):
    """Connections to real engines whose first ``streams`` answers break after a number of ``parts``.

    ``bodies``: of the requests, in order.
    """

    def __init__(self, streams: int, parts: int) -> None:
        self._real, self._left, self._parts = Connections(), streams, parts
        self.bodies: list[dict[str, Any]] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await self._real.handle_async_request(request)
        if request.url.path != "/generate":
            return response
        self.bodies.append(json.loads(request.content))
        if self._left == 0:
            return response
        self._left -= 1
        assert isinstance(response.stream, httpx.AsyncByteStream)
        return httpx.Response(200, stream=_Broken(response.stream, self._parts))

    async def aclose(self) -> None:
        await self._real.aclose()


class _Broken(httpx.AsyncByteStream):
    def __init__(self, body: httpx.AsyncByteStream, parts: int) -> None:
        self._body, self._parts = body, parts

    async def __aiter__(self) -> AsyncIterator[bytes]:
        seen = b""
        async for part in self._body:
            yield part
            seen += part
            if seen.count(b"\n\n") >= self._parts:
                raise httpx.ReadError("the engine is gone")

    async def aclose(self) -> None:
        await self._body.aclose()
