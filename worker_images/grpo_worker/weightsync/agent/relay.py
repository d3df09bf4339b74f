"""Relay: the first host's agent passes on what a further host's agent cannot read itself.

An agent that does not reach the sources of a version, but the first host's agent does, reads them through it.
Nothing but files of the version that the engine loads now is passed on, and no file is held in memory.
"""

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager

import httpx
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from grpo_worker.common import tls
from grpo_worker.common.auth import pair_headers
from grpo_worker.weightsync.agent.sources import url_of

RELAY = "/v1/relay"
_STEP = 256 << 10  # bytes that are passed on at once
_HOP_BY_HOP = ("connection", "date", "keep-alive", "server", "transfer-encoding")


class Relay:
    """Access to the files of one version. ``timeout``: seconds that a source may send no byte."""

    def __init__(self, timeout: float = 60.0) -> None:
        self.timeout = timeout
        self._version, self._sources = 0, dict[int, str]()

    @contextmanager
    def of(self, version: int, sources: Mapping[int, str]) -> Iterator[None]:
        """Pass the files of a version on while the context is open. ``sources``: rank -> base URL."""
        self._version, self._sources = version, dict(sources)
        try:
            yield
        finally:
            self._sources = {}

    def url(self, version: int, rank: int, suffix: str) -> str:
        """Return the URL of a file. Raises LookupError if the engine does not load it now."""
        if version != self._version or rank not in self._sources:
            raise LookupError(f"the engine does not load rank {rank} of version {version} now")
        return url_of(self._sources, version, rank, suffix)


def relay_route(relay: Relay) -> Route:
    """Return the route; it answers as the source does."""
    client = httpx.AsyncClient(timeout=relay.timeout, verify=tls.pair())

    async def answer(request: Request) -> Response:
        place = request.path_params
        try:
            url = relay.url(place["version"], place["rank"], place["suffix"])
            wanted = {"range": request.headers["range"]} if "range" in request.headers else {}
            query = client.build_request("GET", url, headers=pair_headers() | wanted)
            response = await client.send(query, stream=True)
        except LookupError as error:
            return JSONResponse({"error": str(error)}, 409)
        except httpx.HTTPError as error:
            return JSONResponse({"error": f"{url}: {error!r}"}, 502)
        fields = {name: value for name, value in response.headers.items() if name not in _HOP_BY_HOP}
        return StreamingResponse(_body(response), response.status_code, fields)

    return Route(f"{RELAY}/v1/weights/{{version:int}}/{{rank:int}}.{{suffix:str}}", answer)


async def _body(response: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for piece in response.aiter_raw(_STEP):
            yield piece
    finally:
        await response.aclose()
