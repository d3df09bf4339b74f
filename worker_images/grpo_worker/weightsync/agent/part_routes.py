"""HTTP routes by which the first host's agent leads the host parts of a further host."""

import threading
from collections.abc import Callable, Sequence

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from grpo_worker.weightsync.agent.host_part import HostPart, PartError
from grpo_worker.weightsync.agent.part_messages import PartRequest, table_bytes, table_from
from grpo_worker.weightsync.agent.part_source import PartSource


class HostParts:
    """The parts of one further host, one at a time: a new one ends the one before. Thread-safe."""

    def __init__(self, source: PartSource, timeout: float) -> None:
        self._source, self._timeout = source, timeout
        self._lock = threading.Lock()
        self._current: HostPart | None = None

    def begin(self, request: PartRequest) -> None:
        """Begin a part."""
        with self._lock:
            before = self._current
            if before is not None:
                before.close()
            self._current = HostPart(request, self._source, self._timeout, before)

    def get(self, name: str) -> HostPart:
        """Return the current part. Raises PartError if it has another name."""
        current = self._current
        if current is None or current.name != name:
            raise PartError("this agent has no such part: it has restarted, or has begun another")
        return current


def part_routes(parts: HostParts) -> Sequence[BaseRoute]:
    """Return the routes of a further host's agent."""

    async def begin(request: Request) -> Response:
        parts.begin(PartRequest.from_json(await request.json()))
        return JSONResponse({})

    async def one(request: Request) -> Response:
        name = request.path_params["name"]

        def state() -> Response:
            part = parts.get(name)
            if request.method == "DELETE":
                part.close()
            return JSONResponse(part.state().to_json())

        return await _answer(state)

    async def kept(request: Request) -> Response:
        name = request.path_params["name"]
        return await _answer(
            lambda: Response(table_bytes(parts.get(name).kept()), media_type="application/octet-stream")
        )

    async def release(request: Request) -> Response:
        name, counted = request.path_params["name"], table_from(await request.body())

        def call() -> Response:
            parts.get(name).release(counted)
            return JSONResponse({})

        return await _answer(call)

    return [
        Route("/v1/part", begin, methods=["POST"]),
        Route("/v1/part/{name:str}", one, methods=["GET", "DELETE"]),
        Route("/v1/part/{name:str}/kept", kept),
        Route("/v1/part/{name:str}/release", release, methods=["POST"]),
    ]


async def _answer(call: Callable[[], Response]) -> Response:
    try:
        return await run_in_threadpool(call)
    except PartError as error:
        return JSONResponse({"error": str(error)}, 409)
