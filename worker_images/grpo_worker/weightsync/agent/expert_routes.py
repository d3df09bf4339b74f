"""HTTP routes of an engine's agent for routed experts, which trainer ranks read."""

from collections.abc import Sequence
from pathlib import Path

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from grpo_worker.common.known_fields import known
from grpo_worker.data.expert_folder import ExpertFolder
from grpo_worker.data.routed_experts import RoutedExperts


def expert_routes(root: Path | None) -> Sequence[BaseRoute]:
    """Return the routes for the folder ``root``; none for an engine that returns no routed experts."""
    if root is None:
        return []
    folder = ExpertFolder(root)

    async def read(request: Request) -> Response:
        """Answer with the bytes of layers and tokens of several samples, see ExpertFolder.read."""
        body = await request.json()
        references = [RoutedExperts(**known(RoutedExperts, fields)) for fields in body["references"]]
        pieces = folder.read(references, body["layers"], body["spans"])
        return StreamingResponse(pieces, media_type="application/octet-stream")

    async def drop(request: Request) -> Response:
        """Remove samples."""
        await run_in_threadpool(folder.drop, (await request.json())["keys"])
        return JSONResponse({})

    return [
        Route("/v1/routed-experts/read", read, methods=["POST"]),
        Route("/v1/routed-experts/drop", drop, methods=["POST"]),
    ]
