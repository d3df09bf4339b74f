"""A server that answers while its scheduler does not: it gets no more calls and is finally restarted."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from grpo_operator.api.v1alpha1.status import EngineState
from grpo_worker.rollout.routing import EngineEntry, EngineTable
from grpo_worker.weightsync.agent import agent as agents
from grpo_worker.weightsync.agent.agent import Agent
from grpo_worker.weightsync.agent.engine_client import Engine, EngineError
from grpo_worker.weightsync.agent.http import rollout_application
from grpo_worker.weightsync.agent.installer import UpdateError

JOB = "default/tiny"


class Server(ThreadingHTTPServer):
    """Answers /ping; all other routes wait for the scheduler."""

    daemon_threads = True

    def __init__(self) -> None:
        self.scheduler = threading.Event()
        self.requests: list[str] = []
        super().__init__(("127.0.0.1", 0), _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.do_GET()

    def do_GET(self) -> None:
        if self.path != "/ping":
            self.server.requests.append(self.path)
            self.server.scheduler.wait(30)
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(b'{"weight_version": "default"}')

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.scheduler.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def engine(server: Server, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr("grpo_worker.weightsync.agent.engine_client._SHORT", 0.2)
    return Engine(f"http://127.0.0.1:{server.server_port}", 0.2)


def test_after_one_timeout_no_more_calls_are_queued(server: Server, engine: Engine) -> None:
    agent = Agent("engine-0", engine, 1, 1 << 20, 0.2, JOB)
    agent.watch()
    with pytest.raises(EngineError, match="/begin_weight_update"):
        engine.begin_update()
    assert engine.unresponsive_seconds() > 0 and agent.status()["silent"]
    with pytest.raises(UpdateError, match="version 1, plan: /server_info"):
        agent.sync(JOB, 1, {})
    with pytest.raises(EngineError, match="/server_info"):
        agent.watch()
    assert set(server.requests) == {"/begin_weight_update", "/server_info"}
    server.scheduler.set()
    agent.watch()
    assert engine.unresponsive_seconds() == 0 and not agent.status()["silent"]


def test_answers_without_the_scheduler_do_not_end_unresponsiveness(server: Server, engine: Engine) -> None:
    with pytest.raises(EngineError):
        engine.end_update()
    server.scheduler.set()
    engine.weight_version()
    assert engine.unresponsive_seconds() > 0
    engine.on_replaced()  # the server was replaced
    assert engine.unresponsive_seconds() == 0


def test_the_liveness_probe_fails_after_long_unresponsiveness(
    server: Server, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents, "UNRESPONSIVE_SECONDS", 0.0)
    agent = Agent("engine-0", engine, 1, 1 << 20, 0.2, JOB)
    probe = TestClient(rollout_application(agent))
    assert probe.get("/enginez").status_code == httpx.codes.OK
    with pytest.raises(EngineError):
        engine.end_update()  # 0.2 s: as long as the agent's patience
    assert probe.get("/enginez").status_code == httpx.codes.SERVICE_UNAVAILABLE
    server.scheduler.set()
    engine.check_responsive()
    assert probe.get("/enginez").status_code == httpx.codes.OK


def test_an_engine_that_does_not_answer_at_all_is_not_alive(engine: Engine) -> None:
    gone = Agent("engine-0", Engine("http://127.0.0.1:9", 0.2), 1, 1 << 20, 0.2, JOB)
    assert TestClient(rollout_application(gone)).get("/enginez").status_code == 503


def test_an_unresponsive_engine_is_left_out_of_direct_transfers() -> None:
    table = EngineTable()
    states = {"a": EngineState.STALE, "b": EngineState.SERVING, "c": EngineState.RESTARTING}
    entries = [EngineEntry(name, "10.0.0.1", state, None) for name, state in states.items()]
    table.replace([*entries, EngineEntry("d", "10.0.0.1", EngineState.STALE, None, unresponsive=True)])
    assert [entry.name for entry in table.reachable()] == ["a", "b"]
