"""HTTP transport for thousands of streams at once."""

from collections.abc import AsyncIterator

import aiohttp
import httpx

from grpo_worker.common import tls

# Less than the 5 s after which SGLang's server closes an idle connection: it must not be used again by then.
_IDLE_SECONDS = 4.0
_OWN_HEADERS = ("host", "content-length", "connection", "accept-encoding", "user-agent")  # aiohttp sets them
_BROKEN = (aiohttp.ServerDisconnectedError, aiohttp.ClientPayloadError, aiohttp.ClientResponseError)


class Connections(httpx.AsyncBaseTransport):
    """Transport with one connection for each request in flight; idle ones are used again.

    Requests go through aiohttp: httpx's own transport takes several times its CPU for each of them, and
    its pool walks over all its connections, which takes minutes at 8192.
    """

    def __init__(self) -> None:
        self._opened: aiohttp.ClientSession | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request over an idle connection to its host, or over a new one."""
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=request.extensions.get("timeout", {}).get("connect")
        )
        headers = {name: value for name, value in request.headers.items() if name not in _OWN_HEADERS}
        try:
            answer = await self._session().request(
                request.method, str(request.url), data=request.content or None, headers=headers,
                timeout=timeout, allow_redirects=False,
            )  # fmt: skip
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _as_httpx(error, request) from error
        return httpx.Response(
            answer.status, headers=answer.raw_headers, stream=_Body(answer, request), request=request
        )

    async def aclose(self) -> None:
        """Close all idle connections."""
        session, self._opened = self._opened, None
        if session is not None:
            await session.close()

    def _session(self) -> aiohttp.ClientSession:
        if self._opened is None:  # it belongs to the event loop that runs now
            self._opened = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_SECONDS, ssl=tls.pair()),
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=("user-agent", "accept-encoding"),
                auto_decompress=False,
            )
        return self._opened


class _Body(httpx.AsyncByteStream):
    """Body of a response. Its connection is used again if the body was read to its end, and closed if not."""

    def __init__(self, answer: aiohttp.ClientResponse, request: httpx.Request) -> None:
        self._answer, self._request = answer, request

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for part in self._answer.content.iter_any():
                yield part
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _as_httpx(error, self._request) from error

    async def aclose(self) -> None:
        self._answer.close()


def _as_httpx(error: Exception, request: httpx.Request) -> httpx.TransportError:
    """Return httpx's error for one of aiohttp."""
    kind: type[httpx.TransportError] = httpx.ReadError
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        kind = httpx.ConnectTimeout
    elif isinstance(error, aiohttp.ClientConnectorError):
        kind = httpx.ConnectError
    elif isinstance(error, _BROKEN):
        kind = httpx.RemoteProtocolError
    return kind(str(error) or type(error).__name__, request=request)
