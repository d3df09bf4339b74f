"""Sidecar entry point: ``grpo-agent trainer`` or ``grpo-agent rollout``."""

import argparse
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from grpo_worker.common.auth import guarded

if TYPE_CHECKING:
    from grpo_worker.weightsync.agent import Agent
    from grpo_worker.weightsync.engine import Engine

log = logging.getLogger(__name__)
WATCH_SECONDS = 1.0


def main() -> None:
    """Run the agent of one pod until it is stopped."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=["trainer", "rollout"])
    parser.add_argument("--host", default="0.0.0.0", help="address to listen on")
    parser.add_argument("--port", type=int, default=9000)
    parser.add_argument("--name", default=os.environ.get("POD_NAME", socket.gethostname()))
    parser.add_argument("--weights", type=Path, default=Path("/weights"), help="shared memory")
    parser.add_argument("--engine", default="http://127.0.0.1:30000")
    parser.add_argument("--engine-ranks", type=int, default=1)
    parser.add_argument("--bucket-megabytes", type=int, default=512)
    parser.add_argument("--model-config", type=Path, help="the engine's config.json")
    parser.add_argument("--admin-key", type=Path, help="file with the key to the engine's control routes")
    parser.add_argument("--deltas", action="store_true", help="fetch what changed instead of all bytes")
    parser.add_argument("--nixl", action="store_true", help="read the trainers' memory by NIXL")
    parser.add_argument("--turns", type=Path, help="file: trainers and engine take turns on the same GPUs")
    parser.add_argument("--writer", help="the job that may sync; default: wait to be told")
    parser.add_argument("--timeout", type=float, default=120, help="seconds of one call")
    args = parser.parse_args()
    app = _trainer(args.weights) if args.role == "trainer" else _rollout(args)
    uvicorn.run(app, host=args.host, port=args.port, log_level="warning")


def _trainer(weights: Path) -> Starlette:
    from grpo_worker.weightsync.source import application

    return application(weights)


def _rollout(args: argparse.Namespace) -> Starlette:
    from grpo_worker.weightsync.engine import Engine

    engine = Engine(args.engine, args.timeout, args.admin_key)
    if os.environ.get("HOST_INDEX", "0") != "0":
        return _further_host(engine)
    from grpo_worker.weightsync.agent import Agent
    from grpo_worker.weightsync.importer import Importer
    from grpo_worker.weightsync.pull import Puller

    bucket = args.bucket_megabytes << 20
    puller = Puller(args.timeout, args.deltas, Importer() if args.nixl else None)
    agent = Agent(args.name, engine, args.engine_ranks, bucket, args.timeout, args.writer, puller, args.turns)
    threading.Thread(target=_watch_forever, args=(agent,), daemon=True).start()
    return rollout_application(agent, args.model_config)


def _further_host(engine: "Engine") -> Starlette:
    """An engine of several hosts is spoken for by the agent of its first."""
    ok = [Route(path, lambda _: PlainTextResponse("ok")) for path in ("/healthz", "/readyz")]
    return Starlette(routes=[*ok, Route("/enginez", _engine_route(engine.alive))])


def _engine_route(lives: Callable[[], bool]) -> Callable[[Request], Response]:
    """What the liveness probe of the engine's container is told."""

    def answer(_: Request) -> Response:
        return PlainTextResponse("ok") if lives() else PlainTextResponse("the engine does not answer", 503)

    return answer


def _watch_forever(agent: "Agent") -> None:
    from grpo_worker.weightsync.engine import EngineError
    from grpo_worker.weightsync.install import UpdateError

    while True:
        try:
            agent.watch()
        except (EngineError, UpdateError) as error:
            log.warning("watch: %s", error)
        except Exception:
            log.exception("watch failed")
        time.sleep(WATCH_SECONDS)


def rollout_application(agent: "Agent", model_config: Path | None = None) -> Starlette:
    """HTTP application of a rollout agent. ``model_config``: what its engine was started with."""
    from grpo_worker.weightsync.agent import WriterError
    from grpo_worker.weightsync.link.agent_end import LinkOffer

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
        return await answer(body, agent.join, LinkOffer.from_json(body["offer"]))

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


if __name__ == "__main__":
    main()
