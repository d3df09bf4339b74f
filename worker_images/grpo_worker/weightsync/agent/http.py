"""HTTP application of the agent beside an engine: probes, status, and the controller's calls."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from grpo_worker.common.auth import guarded
from grpo_worker.weightsync.agent.agent import Agent
from grpo_worker.weightsync.agent.engine_client import Engine
from grpo_worker.weightsync.agent.expert_routes import expert_routes
from grpo_worker.weightsync.agent.writer_guard import WriterError
from grpo_worker.weightsync.protocol.group_offer import GroupOffer


def further_host_application(engine: Engine, experts: Path | None = None) -> Starlette:
    """Return the application on further hosts of a multi-host engine, which the first host's agent serves."""
    ok = [Route(path, lambda _: PlainTextResponse("ok")) for path in ("/healthz", "/readyz")]
    return guarded([*ok, Route("/enginez", _engine_route(engine.alive)), *expert_routes(experts)])


def _engine_route(lives: Callable[[], bool]) -> Callable[[Request], Response]:
    """Return the route for the liveness probe of the engine's container."""

    def answer(_: Request) -> Response:
        return PlainTextResponse("ok") if lives() else PlainTextResponse("the engine does not answer", 503)

    return answer


def rollout_application(
    agent: Agent, model_config: Path | None = None, experts: Path | None = None
) -> Starlette:
    """Return the application of an agent.

    ``model_config``: config.json that its engine started with. ``experts``: folder in which the engine keeps
    routed experts.
    """
    routes = _AgentRoutes(agent, model_config)
    return guarded(
        [
            Route("/healthz", lambda _: PlainTextResponse("ok")),
            Route("/metrics", routes.metrics),
            Route("/readyz", routes.ready),
            Route("/enginez", _engine_route(agent.engine_lives)),
            Route("/turnz", routes.may_start),
            Route("/v1/turn", routes.grant_gpu_memory, methods=["POST"]),
            Route("/v1/writer", routes.bind, methods=["POST"]),
            Route("/v1/status", routes.status),
            Route("/v1/model", routes.model),
            Route("/v1/sync", routes.sync, methods=["POST"]),
            Route("/v1/link", routes.join, methods=["POST"]),
            Route("/v1/take", routes.receive, methods=["POST"]),
            *expert_routes(experts),
        ]
    )


class _AgentRoutes:
    """Routes of one agent. Calls that change the engine run in a thread and return the agent's status."""

    def __init__(self, agent: Agent, model_config: Path | None) -> None:
        self._agent = agent
        self._model_config = model_config

    def status(self, _: Request) -> Response:
        return JSONResponse(self._agent.status())

    def ready(self, _: Request) -> Response:
        """Answer the readiness probe; an engine whose GPUs the trainers use is ready too."""
        state = self._agent.status()
        return JSONResponse(state, 200 if state["state"] == "SERVING" or state["waits"] else 503)

    def may_start(self, _: Request) -> Response:
        """Tell the engine's container whether it may start the server."""
        return PlainTextResponse("ok") if self._agent.may_start() else PlainTextResponse("not yet", 503)

    def model(self, _: Request) -> Response:
        """Answer with the config.json of the engine's model."""
        if self._model_config is None or not self._model_config.is_file():
            return JSONResponse({"error": "the engine has no config.json yet"}, 404)
        return Response(self._model_config.read_bytes(), media_type="application/json")

    def metrics(self, _: Request) -> Response:
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    async def bind(self, request: Request) -> Response:
        await run_in_threadpool(self._agent.bind, (await request.json())["writer"])
        return JSONResponse(self._agent.status())

    async def sync(self, request: Request) -> Response:
        body = await request.json()
        sources = {int(rank): url for rank, url in body["sources"].items()}
        return await self._call(body, self._agent.sync, body["version"], sources, body.get("link"))

    async def join(self, request: Request) -> Response:
        body = await request.json()
        return await self._call(body, self._agent.join, GroupOffer.from_json(body["offer"]))

    async def receive(self, request: Request) -> Response:
        body = await request.json()
        return await self._call(body, self._agent.receive, body["version"], body["link"])

    async def grant_gpu_memory(self, request: Request) -> Response:
        body = await request.json()
        return await self._call(body, self._agent.grant_gpu_memory, body["parts"])

    async def _call(
        self, body: dict[str, Any], method: Callable[..., dict[str, Any]], *args: Any
    ) -> Response:
        """Call a method for the writer and attempt in ``body``; 409 if another one owns the engine."""
        call = partial(method, body["writer"], *args, attempt=body["attempt"])
        try:
            return JSONResponse(await run_in_threadpool(call))
        except WriterError as error:
            return JSONResponse(self._agent.status() | {"error": str(error)}, 409)
        except Exception as error:  # noqa: BLE001 - the caller gets every error in the answer
            return JSONResponse(self._agent.status() | {"error": str(error)}, 500)
