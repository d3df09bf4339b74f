"""Trainer-side agent: serves the slices that the pod's ranks left in shared memory.

It keeps answering while the trainer process computes, restarts or is gone, so a late engine
never waits for the trainer.
"""

from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route


def application(root: Path) -> Starlette:
    """HTTP application over ``root/vN/rank-R.{json,bin}``."""

    def versions(_: Request) -> Response:
        found: dict[str, list[int]] = {}
        for path in root.glob("v*/rank-*.json"):
            found.setdefault(path.parent.name[1:], []).append(int(path.stem.removeprefix("rank-")))
        return JSONResponse({version: sorted(ranks) for version, ranks in found.items()})

    def file(request: Request) -> Response:
        version, rank = request.path_params["version"], request.path_params["rank"]
        suffix = request.path_params["suffix"]
        path = root / f"v{version}" / f"rank-{rank}.{suffix}"
        if suffix not in ("json", "bin") or not path.is_file():
            return JSONResponse({"error": f"version {version} of rank {rank} is not here"}, 404)
        return FileResponse(path)

    return Starlette(
        routes=[
            Route("/healthz", lambda _: PlainTextResponse("ok")),
            Route("/v1/versions", versions),
            Route("/v1/weights/{version:int}/{rank:int}.{suffix:str}", file),
        ]
    )
