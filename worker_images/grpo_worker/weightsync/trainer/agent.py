"""Trainer sidecar: serves the blobs that the pod's ranks published, and keeps checkpoint snapshots.

It answers while the trainer process computes, restarts or is gone, so that a restarted engine never waits for
the trainer. The snapshots are those of the pod's own ranks and of ranks of other pods.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from grpo_worker.checkpointing.snapshot_seal import Snapshot, SnapshotError
from grpo_worker.checkpointing.snapshot_transfer import pull
from grpo_worker.checkpointing.snapshots import NOTE, STATE, file_of, remove_older, seal
from grpo_worker.common.auth import guarded
from grpo_worker.common.prometheus import metrics_route
from grpo_worker.weightsync.protocol.manifest import rank_file
from grpo_worker.weightsync.transport.nixl.exporter import Exporter

PULL_TIMEOUT = 300.0  # seconds without a byte


class LargeFile(FileResponse):
    """A file sent in chunks that keep the cost of system calls low, for a hundred readers at once."""

    chunk_size = 1 << 20


def application(root: Path) -> Starlette:
    """Return the HTTP application over ``root/vN/rank-R.{json,bin}`` and ``root/snapshots``."""
    weights, snapshots = _Weights(root), _Snapshots(root / "snapshots")
    return guarded(
        [
            Route("/healthz", lambda _: PlainTextResponse("ok")),
            metrics_route(),
            Route("/v1/versions", weights.versions),
            Route("/v1/snapshots", snapshots.fetch, methods=["POST"]),
            Route("/v1/snapshots/seals", snapshots.seal, methods=["POST"]),
            Route("/v1/snapshots/{name:str}/{rank:int}.{suffix:str}", snapshots.file),
            Route("/v1/weights/{version:int}/{rank:int}.delta", weights.delta),
            Route("/v1/weights/{version:int}/{rank:int}.nixl", weights.nixl_offer),
            Route("/v1/weights/{version:int}/{rank:int}.{suffix:str}", weights.file),
        ],
        pair=_is_read_by_engines,
    )


def _is_read_by_engines(path: str) -> bool:
    return path == "/v1/versions" or path.startswith("/v1/weights/")


class _Weights:
    """Routes of published versions."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._exporter = Exporter()

    def versions(self, _: Request) -> Response:
        """Answer with the ranks of each version."""
        ranks_of: dict[str, list[int]] = {}
        for path in self._root.glob("v*/rank-*.json"):
            ranks_of.setdefault(path.parent.name[1:], []).append(int(path.stem.removeprefix("rank-")))
        return JSONResponse({version: sorted(ranks) for version, ranks in ranks_of.items()})

    def file(self, request: Request) -> Response:
        """Answer with a manifest (json) or a blob (bin)."""
        path = self._path(request, request.path_params["suffix"])
        if request.path_params["suffix"] not in ("json", "bin") or not path.is_file():
            return _not_here(request)
        return LargeFile(path)

    def nixl_offer(self, request: Request) -> Response:
        """Answer with what a NIXL reader needs to read the blob."""
        try:
            offer = self._exporter.offer(self._path(request, "bin"))
        except FileNotFoundError:
            return _not_here(request)
        except Exception as error:  # noqa: BLE001 - NIXL's exceptions have no common base
            return JSONResponse({"error": f"NIXL: {error!r}"}, 501)
        return JSONResponse(offer._asdict())

    def delta(self, request: Request) -> Response:
        """Answer with the changes since the blob whose digest is the query parameter ``base``."""
        base = request.query_params.get("base", "")
        path = self._path(request, f"{base}.delta")
        if not base.isalnum() or not path.is_file():
            return JSONResponse({"error": f"no delta from the blob of digest {base!r}"}, 404)
        return LargeFile(path)

    def _path(self, request: Request, suffix: str) -> Path:
        return rank_file(self._root, request.path_params["version"], request.path_params["rank"], suffix)


def _not_here(request: Request) -> Response:
    version, rank = request.path_params["version"], request.path_params["rank"]
    return JSONResponse({"error": f"version {version} of rank {rank} is not here"}, 404)


class _Snapshots:
    """Routes of checkpoint snapshots."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def file(self, request: Request) -> Response:
        """Answer with a rank's snapshot (safetensors) or its note (json)."""
        params = request.path_params
        try:
            path = file_of(self._root, params["name"], params["rank"]).with_suffix(f".{params['suffix']}")
        except ValueError as error:
            return JSONResponse({"error": str(error)}, 400)
        if f".{params['suffix']}" not in (STATE, NOTE) or not path.is_file():
            return JSONResponse({"error": f"no snapshot {params['name']} of rank {params['rank']}"}, 404)
        return LargeFile(path)

    async def seal(self, request: Request) -> Response:
        """Seal the snapshot that a rank of this pod has written."""
        return await _answer(request, lambda body: seal(self._root, Snapshot.of(body)))

    async def fetch(self, request: Request) -> Response:
        """Fetch a rank's snapshot from one of the pods that hold it, and keep it.

        The memory for it must be free: older snapshots, except ``kept``, are removed before.
        """
        return await _answer(request, self._fetch)

    def _fetch(self, body: dict[str, Any]) -> None:
        which = Snapshot.of(body)
        remove_older(self._root, which.name, body["kept"])
        pull(self._root, which, body["holders"], PULL_TIMEOUT)


async def _answer(request: Request, call: Callable[[dict[str, Any]], None]) -> Response:
    try:
        await run_in_threadpool(call, await request.json())
    except ValueError as error:
        return JSONResponse({"error": str(error)}, 400)
    except SnapshotError as error:
        return JSONResponse({"error": str(error)}, 404)
    except OSError as error:
        return JSONResponse({"error": str(error)}, 500)
    return JSONResponse({})
