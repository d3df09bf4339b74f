"""HTTP requests to engines, directly on a transport: httpx's client costs milliseconds for each request."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

import httpx

from grpo_operator.api.names import ENGINE_PORT
from grpo_worker.common import tls

CONNECT_SECONDS = 10.0


class EngineHttp:
    """Requests to the engines' servers. The time between two parts of an answer is not limited."""

    def __init__(self, transport: httpx.AsyncBaseTransport, port: int = ENGINE_PORT) -> None:
        self._transport = transport
        self._port = port
        self._headers = tls.generate_headers()
        self._extensions = {
            "timeout": {"connect": CONNECT_SECONDS, "read": None, "write": None, "pool": None}
        }

    @asynccontextmanager
    async def post(self, address: str, path: str, body: Mapping[str, Any]) -> AsyncIterator[httpx.Response]:
        """Send JSON; yield the response before its body was read. Raises httpx.TransportError."""
        content = json.dumps(body).encode()
        response = await self._send("POST", address, path, {"content-type": "application/json"}, content)
        try:
            yield response
        finally:
            await response.aclose()

    async def get(self, address: str, path: str) -> Any:
        """Return the JSON of an answer. Raises httpx.HTTPError, ValueError."""
        response = await self._send("GET", address, path, {}, b"")
        try:
            await response.aread()
        finally:
            await response.aclose()
        response.raise_for_status()
        return response.json()

    async def aclose(self) -> None:
        """Close all connections."""
        await self._transport.aclose()

    async def _send(
        self, method: str, address: str, path: str, headers: dict[str, str], content: bytes
    ) -> httpx.Response:
        url = _parsed(tls.url(address, self._port, path))
        headers |= self._headers
        request = httpx.Request(method, url, headers=headers, content=content, extensions=self._extensions)
        response = await self._transport.handle_async_request(request)
        response.request = request
        return response


@cache  # parsing takes a tenth of a request's CPU, and engines are few
def _parsed(url: str) -> httpx.URL:
    return httpx.URL(url)
