"""HTTP application of the agent beside an engine: probes, status, and the controller's calls."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from grpo_worker.common.auth import guarded
from grpo_worker.common.known_fields import known
from grpo_worker.common.prometheus import metrics_route
from grpo_worker.weightsync.agent.agent import Agent
from grpo_worker.weightsync.agent.engine_place import EnginePlace
from grpo_worker.weightsync.agent.engine_profiles import EngineProfiles
from grpo_worker.weightsync.agent.expert_routes import expert_routes
from grpo_worker.weightsync.agent.further_host import host_route, report_of
from grpo_worker.weightsync.agent.host_rendezvous import HostReport
from grpo_worker.weightsync.agent.peer_routes import peer_routes
from grpo_worker.weightsync.agent.profile_routes import profile_routes
from grpo_worker.weightsync.agent.relay import relay_route
from grpo_worker.weightsync.agent.writer_guard import WriterError
from grpo_worker.weightsync.protocol.link_offer import LinkOffer

_BIND = "/v1/writer"  # the operator alone decides which job a shared pool serves


def _engine_route(lives: Callable[[], bool]) -> Callable[[Request], Response]:
    """Return the route for the liveness probe of the engine's container."""

    def answer(_: Request) -> Response:
        return PlainTextResponse("ok") if lives() else PlainTextResponse("the engine does not answer", 503)

    return answer


def rollout_application(
    agent: Agent,
    model_config: Path | None = None,
    place: EnginePlace | None = None,
    experts: Path | None = None,
    profiles: EngineProfiles | None = None,
) -> Starlette:
    """Return the application of an agent.

    ``model_config``: config.json that its engine started with. ``place``: of an engine of several hosts,
    whose other hosts report here. ``experts``: folder in which the engine keeps routed experts.
    ``profiles``: of the engine.
    """
    hosts = _host_routes(agent, place) if place else []
    routes = _AgentRoutes(agent, model_config)
    return guarded(
        [
            Route("/healthz", lambda _: PlainTextResponse("ok")),
            metrics_route(),
            Route("/readyz", routes.ready),
            Route("/enginez", _engine_route(agent.engine_lives)),
            Route("/turnz", routes.may_start),
            Route("/v1/turn", routes.grant_gpu_memory, methods=["POST"]),
            Route(_BIND, routes.bind, methods=["POST"]),
            Route("/v1/status", routes.status),
            Route("/v1/model", routes.model),
            Route("/v1/sync", routes.sync, methods=["POST"]),
            Route("/v1/link", routes.join, methods=["POST"]),
            Route("/v1/take", routes.receive, methods=["POST"]),
            Route("/v1/give-up", routes.give_up, methods=["POST"]),
            *expert_routes(experts),
            *profile_routes(profiles, agent.check_writer),
            *peer_routes(agent),
            *hosts,
        ],
        pair=lambda path: path != _BIND,
    )


def _host_routes(agent: Agent, place: EnginePlace) -> list[Route]:
    """Return the routes by which the hosts of the engine report: this one, and the others."""

    def serving() -> bool:
        return bool(agent.status()["state"] == "SERVING")

    async def other(request: Request) -> Response:
        report = HostReport(**known(HostReport, await request.json()))
        return JSONResponse(await run_in_threadpool(place.answer, report, serving()))

    def own(fields: dict[str, str]) -> dict[str, Any]:
        return place.answer(report_of(0, agent.name, fields), serving())

    return [
        host_route(own),
        Route("/v1/hosts", other, methods=["POST"]),
        relay_route(place.relay),
    ]


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

    async def bind(self, request: Request) -> Response:
        try:
            await run_in_threadpool(self._agent.bind, (await request.json())["writer"])
        except WriterError as error:
            return JSONResponse(self._agent.status() | {"error": str(error)}, 409)
        return JSONResponse(self._agent.status())

    async def sync(self, request: Request) -> Response:
        body = await request.json()
        sources = {int(rank): url for rank, url in body["sources"].items()}
        return await self._call(body, self._agent.sync, body["version"], sources, body.get("gang"))

    async def join(self, request: Request) -> Response:
        body = await request.json()
        return await self._call(body, self._agent.join, LinkOffer.from_json(body["offer"]))

    async def receive(self, request: Request) -> Response:
        body = await request.json()
        return await self._call(body, self._agent.receive, body["version"], body["link"], body["patience"])

    async def give_up(self, request: Request) -> Response:
        body = await request.json()
        return await self._call(body, self._agent.give_up, body["link"])

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
