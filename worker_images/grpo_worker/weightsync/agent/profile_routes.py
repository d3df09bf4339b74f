"""HTTP routes of an engine's agent for profiles of the engine."""

from collections.abc import Callable, Sequence
from http import HTTPStatus

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Route

from grpo_worker.weightsync.agent.engine_client import EngineError
from grpo_worker.weightsync.agent.engine_profiles import EngineProfiles, ProfileError
from grpo_worker.weightsync.agent.writer_guard import WriterError


def profile_routes(
    profiles: EngineProfiles | None, check_writer: Callable[[str, int], None]
) -> Sequence[BaseRoute]:
    """Return the routes; none for an agent that shares no folder with its engine.

    ``check_writer``: raises WriterError unless this attempt of the job may use the engine.
    """
    if profiles is None:
        return []

    def start(body: dict[str, str | int]) -> None:
        check_writer(str(body["writer"]), int(body["attempt"]))
        profiles.start(str(body["id"]), int(body["steps"]))

    async def begin(request: Request) -> Response:
        body = await request.json()
        try:
            await run_in_threadpool(start, body)
        except WriterError as error:
            return JSONResponse({"error": str(error)}, HTTPStatus.CONFLICT)
        except (EngineError, ProfileError, OSError) as error:
            return JSONResponse({"error": str(error)}, HTTPStatus.INTERNAL_SERVER_ERROR)
        return JSONResponse({})

    def names(request: Request) -> Response:
        """Answer with the names of the complete files; none while the engine records."""
        try:
            return JSONResponse({"files": profiles.files(request.path_params["id"])})
        except (EngineError, ProfileError) as error:
            return JSONResponse({"error": str(error)}, HTTPStatus.NOT_FOUND)

    def read(request: Request) -> Response:
        try:
            return FileResponse(profiles.path(request.path_params["id"], request.path_params["name"]))
        except ProfileError as error:
            return JSONResponse({"error": str(error)}, HTTPStatus.NOT_FOUND)

    return [
        Route("/v1/profile", begin, methods=["POST"]),
        Route("/v1/profile/{id}", names),
        Route("/v1/profile/{id}/{name}", read),
    ]
