"""HTTP routes by which the agents of a pool's other engines read this engine's weights.

A reading has the same files as a trainer's sidecar: a manifest and a blob of each rank.
"""

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import anyio
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from grpo_worker.weightsync.agent.peer_blobs import DIGEST
from grpo_worker.weightsync.agent.served_weights import PeerError

if TYPE_CHECKING:
    from grpo_worker.weightsync.agent.agent import Agent

_READS = 8  # at a time: each has an answer in memory; others wait, so that probes find a free thread
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


def peer_routes(agent: "Agent") -> Sequence[BaseRoute]:
    """Return the routes of an agent."""
    routes = _PeerRoutes(agent)
    place = "/v1/peer/{name:str}/v1/weights/{version:int}/{rank:int}"
    return [
        Route("/v1/peer", routes.offer, methods=["POST"]),
        Route(f"{place}.json", routes.manifest),
        Route(f"{place}.bin", routes.blob),
    ]


class _PeerRoutes:
    def __init__(self, agent: "Agent") -> None:
        self._agent = agent
        self._reads = anyio.Semaphore(_READS)

    async def offer(self, _: Request) -> Response:
        """Answer with a PeerOffer."""
        return await _answer(lambda: JSONResponse(self._agent.offer().to_json()))

    async def manifest(self, request: Request) -> Response:
        """Answer with the manifest of a rank."""
        name, rank = request.path_params["name"], request.path_params["rank"]
        return await _answer(lambda: _json(self._agent.manifest(name, rank).to_json()))

    async def blob(self, request: Request) -> Response:
        """Answer with a range of a rank's blob, and with its digest in the header."""
        name, rank = request.path_params["name"], request.path_params["rank"]
        bounds = _RANGE.fullmatch(request.headers.get("range", ""))
        if bounds is None:
            return JSONResponse({"error": "only ranges of a peer's weights can be read: bytes=A-B"}, 400)
        first, end = int(bounds[1]), int(bounds[2]) + 1

        def read() -> Response:
            data, digest = self._agent.read_weights(name, rank, first, end)
            return Response(data, 206, {DIGEST: digest}, "application/octet-stream")

        async with self._reads:
            return await _answer(read)


async def _answer(call: Callable[[], Response]) -> Response:
    try:
        return await run_in_threadpool(call)
    except PeerError as error:
        return _error(error, 409)
    except ValueError as error:
        return _error(error, 400)


def _error(error: Exception, status: int) -> Response:
    body: dict[str, Any] = {"error": str(error)}
    return JSONResponse(body, status)


def _json(text: str) -> Response:
    return Response(text, media_type="application/json")
