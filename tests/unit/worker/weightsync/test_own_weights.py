"""The agent of an engine that serves the weights of its own model, beside a stand-in for SGLang's server."""

from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.testclient import TestClient

from grpo_worker.rollout.sglang.prepare import copy_key
from grpo_worker.weightsync.agent.agent import Agent
from grpo_worker.weightsync.agent.engine_client import Engine, EngineError
from grpo_worker.weightsync.agent.engine_place import EnginePlace
from grpo_worker.weightsync.agent.http import rollout_application
from grpo_worker.weightsync.agent.writer_guard import WriterError
from support.engine_server import serve_app


class Server:
    """Routes that need the key of users, as SGLang's do with --api-key and --weight-version."""

    def __init__(self) -> None:
        self.key, self.version, self.up, self.scheduler = "first", "0", True, True
        self.url = serve_app(
            Starlette(
                routes=[
                    Route("/ping", self._answer),
                    Route("/model_info", self._answer),
                    Route("/server_info", self._scheduler),
                ]
            )
        )

    def _answer(self, request: Request) -> Response:
        if not self.up or request.headers.get("authorization") != f"Bearer {self.key}":
            return PlainTextResponse("no", 401 if self.up else 503)
        return JSONResponse({"weight_version": self.version})

    def _scheduler(self, request: Request) -> Response:
        if request.headers.get("authorization") != "Bearer of-control-routes":
            return PlainTextResponse("no", 401)
        return PlainTextResponse("ok" if self.scheduler else "loading", 200 if self.scheduler else 503)


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def key(tmp_path: Path) -> Path:
    file = tmp_path / "api-key"
    file.write_text("first")
    return file


@pytest.fixture
def agent(server: Server, key: Path) -> Agent:
    admin = key.with_name("admin-key")
    admin.write_text("of-control-routes")
    engine = Engine(server.url, 5, admin, api_key=key)
    return Agent("engine-0", engine, 1, 1 << 20, 5, place=EnginePlace(own_weights=True))


def _ready(agent: Agent) -> int:
    with TestClient(rollout_application(agent)) as client:
        return int(client.get("/readyz").status_code)


def test_an_engine_serves_as_soon_as_its_scheduler_answers(agent: Agent, server: Server) -> None:
    server.scheduler = False
    with pytest.raises(EngineError, match="/server_info: HTTP 503"):
        agent.watch()
    assert (agent.status()["state"], _ready(agent)) == ("STALE", 503)
    server.scheduler = True
    agent.watch()
    status = agent.status()
    assert (status["state"], status["weightVersion"], _ready(agent)) == ("SERVING", 0, 200)


def test_an_engine_that_restarts_serves_again_without_a_job(agent: Agent, server: Server) -> None:
    agent.watch()
    server.up = False
    agent.watch()
    assert (agent.status()["state"], _ready(agent)) == ("RESTARTING", 503)
    assert not agent.engine_lives()
    server.up = True
    agent.watch()
    assert (agent.status()["state"], agent.status()["restarts"]) == ("SERVING", 1)


def test_weights_that_somebody_has_changed_are_not_served(agent: Agent, server: Server) -> None:
    agent.watch()
    server.version = "7"
    agent.watch()
    assert agent.status()["restarts"] == 1, "the server is not the one that was started"


def test_a_server_that_starts_with_another_key_is_asked_with_it(
    agent: Agent, server: Server, key: Path, tmp_path: Path
) -> None:
    agent.watch()
    secret = tmp_path / "secret"
    secret.write_text("second\n")
    copy_key(secret, key)
    server.key = "second"
    agent.watch()
    assert agent.status()["state"] == "SERVING" and agent.status()["restarts"] == 0


@pytest.mark.parametrize("text", ["", " \n", "two words"])
def test_a_key_that_no_request_can_have_is_refused(text: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(text)
    with pytest.raises(ValueError, match=r"serve\.secretName must be one word"):
        copy_key(secret, tmp_path / "copy")


def test_no_job_is_bound_and_none_may_write(agent: Agent) -> None:
    agent.watch()
    with pytest.raises(WriterError, match="serves the weights of its own model"):
        agent.bind("job-1")
    with pytest.raises(WriterError, match="may not write"):
        agent.sync("job-1", 3, {})
    with TestClient(rollout_application(agent)) as client:
        answer = client.post("/v1/writer", json={"writer": "job-1"})
    assert answer.status_code == 409 and "own model" in answer.json()["error"]
    status: dict[str, Any] = agent.status()
    assert (status["state"], status["writer"]) == ("SERVING", None)
