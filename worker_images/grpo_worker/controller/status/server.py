"""HTTP server of the controller pod: status for the operator, suspend, Prometheus metrics."""

import threading
from collections.abc import Callable
from http import HTTPStatus

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from grpo_operator.api.messages import EngineSummary, ProfileOrder
from grpo_operator.api.names import CONTROLLER_PORT
from grpo_worker.common.auth import guarded
from grpo_worker.common.listeners import Server
from grpo_worker.common.prometheus import metrics_route
from grpo_worker.controller.status.progress import ProgressBoard
from grpo_worker.rollout.routing import EngineEntry

PORT = CONTROLLER_PORT


def application(
    board: ProgressBoard, engines: Callable[[], list[EngineEntry]], stalled: Callable[[], str] = lambda: ""
) -> Starlette:
    """Return the application: ``GET /v1/status``, ``/metrics``, ``/healthz``, and the operator's requests,
    ``POST /v1/suspend``, ``/v1/profile``, ``/v1/forget-nodes``.

    ``stalled``: returns why the run makes no progress, or "". A controller that another one has superseded
    does not speak for the job any more: it answers ``/v1/status`` with 410 (Gone).
    """

    def status(_: Request) -> Response:
        report = board.get().updated(stalled=stalled(), engines=[_summary(entry) for entry in engines()])
        return JSONResponse(report.wire(), HTTPStatus.GONE if report.superseded else HTTPStatus.OK)

    async def suspend(request: Request) -> Response:
        board.request_suspend(bool((await request.json())["suspend"]))
        return JSONResponse({})

    async def profile(request: Request) -> Response:
        sent = (await request.json())["orders"]
        board.profiles.add([ProfileOrder.model_validate(order) for order in sent])
        return JSONResponse({})

    async def forget_nodes(request: Request) -> Response:
        board.request_forget_nodes(str((await request.json())["request"]))
        return JSONResponse({})

    return guarded(
        [
            Route("/healthz", lambda _: PlainTextResponse("ok")),
            Route("/v1/status", status),
            Route("/v1/suspend", suspend, methods=["POST"]),
            Route("/v1/profile", profile, methods=["POST"]),
            Route("/v1/forget-nodes", forget_nodes, methods=["POST"]),
            metrics_route(),
        ]
    )


def _summary(entry: EngineEntry) -> EngineSummary:
    return EngineSummary(
        name=entry.name,
        address=entry.address,
        state=entry.state,
        version=entry.version,
        restarts=entry.restarts,
        reason=entry.reason,
    )


def serve_in_background(app: Starlette) -> None:
    """Serve on all interfaces from a daemon thread."""
    server = Server(app, PORT)
    threading.Thread(target=server.run, daemon=True, name="status").start()
