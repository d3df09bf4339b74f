"""Trainer-side agent: serves the slices that the pod's ranks left in shared memory, and keeps their
snapshots and those of other pods' ranks.

It keeps answering while the trainer process computes, restarts or is gone, so a late engine
never waits for the trainer.
"""

from functools import partial
from pathlib import Path

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from grpo_worker.checkpointing.snapshots import file_of, pull
from grpo_worker.common.auth import guarded
from grpo_worker.weightsync.protocol.manifest import rank_file
from grpo_worker.weightsync.transport.nixl.exporter import Exporter

PULL_TIMEOUT = 300.0  # seconds without a byte


class LargeFile(FileResponse):
    """A file in pieces that are worth a system call."""

    chunk_size = 4 << 20


def application(root: Path) -> Starlette:
    """HTTP application over ``root/vN/rank-R.{json,bin}`` and ``root/snapshots``."""
    snapshots = root / "snapshots"

    def versions(_: Request) -> Response:
        found: dict[str, list[int]] = {}
        for path in root.glob("v*/rank-*.json"):
            found.setdefault(path.parent.name[1:], []).append(int(path.stem.removeprefix("rank-")))
        return JSONResponse({version: sorted(ranks) for version, ranks in found.items()})

    def file(request: Request) -> Response:
        version, rank = request.path_params["version"], request.path_params["rank"]
        suffix = request.path_params["suffix"]
        path = rank_file(root, version, rank, suffix)
        if suffix not in ("json", "bin") or not path.is_file():
            return JSONResponse({"error": f"version {version} of rank {rank} is not here"}, 404)
        return LargeFile(path)

    exporter = Exporter()

    def offer(request: Request) -> Response:
        of = request.path_params
        try:
            found = exporter.offer(rank_file(root, of["version"], of["rank"], "bin"))
        except FileNotFoundError:
            return JSONResponse({"error": f"version {of['version']} of rank {of['rank']} is not here"}, 404)
        except Exception as error:
            return JSONResponse({"error": f"NIXL: {error!r}"}, 501)
        return JSONResponse(found._asdict())

    def delta(request: Request) -> Response:
        of, base = request.path_params, request.query_params.get("base", "")
        path = rank_file(root, of["version"], of["rank"], f"{base}.delta")
        if not base.isalnum() or not path.is_file():
            return JSONResponse({"error": f"no delta from the blob of digest {base!r}"}, 404)
        return LargeFile(path)

    def snapshot(request: Request) -> Response:
        of = request.path_params
        try:
            path = file_of(snapshots, of["name"], of["rank"]).with_suffix(f".{of['suffix']}")
        except ValueError as error:
            return JSONResponse({"error": str(error)}, 400)
        if of["suffix"] not in ("pt", "json") or not path.is_file():
            return JSONResponse({"error": f"no snapshot {of['name']} of rank {of['rank']}"}, 404)
        return LargeFile(path)

    async def keep(request: Request) -> Response:
        body = await request.json()
        call = partial(pull, snapshots, body["name"], body["rank"], body["holders"], PULL_TIMEOUT)
        try:
            found = await run_in_threadpool(call)
        except ValueError as error:
            return JSONResponse({"error": str(error)}, 400)
        return JSONResponse({}, 200) if found else JSONResponse({"error": "no holder has it"}, 404)

    return guarded(
        [
            Route("/healthz", lambda _: PlainTextResponse("ok")),
            Route("/v1/versions", versions),
            Route("/v1/snapshots", keep, methods=["POST"]),
            Route("/v1/snapshots/{name:str}/{rank:int}.{suffix:str}", snapshot),
            Route("/v1/weights/{version:int}/{rank:int}.delta", delta),
            Route("/v1/weights/{version:int}/{rank:int}.nixl", offer),
            Route("/v1/weights/{version:int}/{rank:int}.{suffix:str}", file),
        ]
    )
