"""HTTP application of the agent beside an engine."""

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
from grpo_worker.weightsync.agent.agent import Agent, WriterError
from grpo_worker.weightsync.agent.engine_client import Engine
from grpo_worker.weightsync.protocol.group_offer import GroupOffer


def further_host_application(engine: Engine) -> Starlette:
    """An engine of several hosts is spoken for by the agent of its first."""
    ok = [Route(path, lambda _: PlainTextResponse("ok")) for path in ("/healthz", "/readyz")]
    return Starlette(routes=[*ok, Route("/enginez", _engine_route(engine.alive))])


def _engine_route(lives: Callable[[], bool]) -> Callable[[Request], Response]:
    """What the liveness probe of the engine's container is told."""

    def answer(_: Request) -> Response:
        return PlainTextResponse("ok") if lives() else PlainTextResponse("the engine does not answer", 503)

    return answer


def rollout_application(agent: Agent, model_config: Path | None = None) -> Starlette:
    """HTTP application of a rollout agent. ``model_config``: what its engine was started with."""

    def status(_: Request) -> Response:
        return JSONResponse(agent.status())

    def ready(_: Request) -> Response:
        state = agent.status()
        return JSONResponse(state, 200 if state["state"] == "SERVING" or state["waits"] else 503)

    async def sync(request: Request) -> Response:
        body = await request.json()
        sources = {int(rank): url for rank, url in body["sources"].items()}
        return await answer(body, agent.sync, body["version"], sources, body.get("link"))

    async def join(request: Request) -> Response:
        body = await request.json()
        return await answer(body, agent.join, GroupOffer.from_json(body["offer"]))

    async def take(request: Request) -> Response:
        body = await request.json()
        return await answer(body, agent.take, body["version"], body["link"])

    async def answer(body: dict[str, Any], call: Callable[..., dict[str, Any]], *args: Any) -> Response:
        written = partial(call, body["writer"], *args, attempt=body["attempt"])
        try:
            return JSONResponse(await run_in_threadpool(written))
        except WriterError as error:
            return JSONResponse(agent.status() | {"error": str(error)}, 409)
        except Exception as error:
            return JSONResponse(agent.status() | {"error": str(error)}, 500)

    async def turn(request: Request) -> Response:
        body = await request.json()
        return await answer(body, agent.turn, body["parts"])

    def may_start(_: Request) -> Response:
        return PlainTextResponse("ok") if agent.may_start() else PlainTextResponse("not yet", 503)

    def model(_: Request) -> Response:
        if model_config is None or not model_config.is_file():
            return JSONResponse({"error": "the engine has no config.json yet"}, 404)
        return Response(model_config.read_bytes(), media_type="application/json")

    async def bind(request: Request) -> Response:
        await run_in_threadpool(agent.bind, (await request.json())["writer"])
        return JSONResponse(agent.status())

    def metrics(_: Request) -> Response:
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    return guarded(
        [
            Route("/healthz", lambda _: PlainTextResponse("ok")),
            Route("/metrics", metrics),
            Route("/readyz", ready),
            Route("/enginez", _engine_route(agent.engine_lives)),
            Route("/turnz", may_start),
            Route("/v1/turn", turn, methods=["POST"]),
            Route("/v1/writer", bind, methods=["POST"]),
            Route("/v1/status", status),
            Route("/v1/model", model),
            Route("/v1/sync", sync, methods=["POST"]),
            Route("/v1/link", join, methods=["POST"]),
            Route("/v1/take", take, methods=["POST"]),
        ]
    )
