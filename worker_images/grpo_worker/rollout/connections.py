"""HTTP transport for thousands of streams at once."""

import ssl
from collections import defaultdict
from collections.abc import AsyncIterator

import httpx

# Never used: engines are reached over http. Without it, httpx would read the CA files for every connection.
_NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


class Connections(httpx.AsyncBaseTransport):
    """Transport with one connection for each request in flight; idle ones are used again.

    httpx's own pool walks over all its connections for each request, which takes minutes of CPU at 8192.
    """

    def __init__(self) -> None:
        self._idle: dict[bytes, list[httpx.AsyncHTTPTransport]] = defaultdict(list)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request over an idle connection to its host, or over a new one."""
        idle = self._idle[request.url.netloc]
        connection = idle.pop() if idle else httpx.AsyncHTTPTransport(verify=_NO_TLS)
        try:
            response = await connection.handle_async_request(request)
        except BaseException:
            await connection.aclose()
            raise
        assert isinstance(response.stream, httpx.AsyncByteStream)
        stream = _Returning(response.stream, connection, idle)
        return httpx.Response(
            response.status_code, headers=response.headers, stream=stream, extensions=response.extensions
        )

    async def aclose(self) -> None:
        """Close all idle connections."""
        for idle in self._idle.values():
            while idle:
                await idle.pop().aclose()


class _Returning(httpx.AsyncByteStream):
    """Body of a response that gives its connection back when it is closed."""

    def __init__(
        self,
        body: httpx.AsyncByteStream,
        connection: httpx.AsyncHTTPTransport,
        idle: list[httpx.AsyncHTTPTransport],
    ) -> None:
        self._body, self._connection, self._idle = body, connection, idle

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._body:
            yield part

    async def aclose(self) -> None:
        await self._body.aclose()  # closes the connection too, unless the body was read to its end
        self._idle.append(self._connection)
