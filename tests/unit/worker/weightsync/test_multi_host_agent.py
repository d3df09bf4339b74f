"""Agents of an engine of two hosts: reports of the second host reach the first, which answers for both."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from grpo_operator.api.messages import AgentStatus
from grpo_operator.api.v1alpha1.rolloutpool import EngineSpec
from grpo_operator.api.v1alpha1.status import EngineState, HostState
from grpo_worker.weightsync.agent.agent import Agent
from grpo_worker.weightsync.agent.detours import Detours
from grpo_worker.weightsync.agent.engine_client import Engine
from grpo_worker.weightsync.agent.engine_place import START_SECONDS, EnginePlace
from grpo_worker.weightsync.agent.fetcher import Fetcher
from grpo_worker.weightsync.agent.further_host import FurtherHost, answers, application
from grpo_worker.weightsync.agent.host_rendezvous import HostRendezvous, HostReport
from grpo_worker.weightsync.agent.http import rollout_application
from grpo_worker.weightsync.agent.part_routes import HostParts
from grpo_worker.weightsync.agent.part_source import PartSource
from support.engine_server import serve_app

NOTHING = "http://127.0.0.1:9"


class _Ping(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def server() -> Iterator[str]:
    """URL of a server that answers /ping."""
    http = ThreadingHTTPServer(("127.0.0.1", 0), _Ping)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{http.server_port}"
    http.shutdown()


class Pair:
    """Both agents, served over HTTP, and what their containers run."""

    def __init__(self, server: str) -> None:
        hosts = HostRendezvous(2)
        self.place = EnginePlace("10.0.0.7", hosts)
        self.agent = Agent("pod-a", Engine(server, 1, None, hosts), 2, 1 << 20, 1, place=self.place)
        self.first = serve_app(rollout_application(self.agent, None, self.place))
        self.further = FurtherHost(1, "pod-b", self.first, lambda: answers(server))
        self.second = serve_app(application(self.further, parts()))
        self.rounds = ["", ""]

    def report(self, processes: tuple[str, str] = ("x", "y"), **fields: str) -> list[dict[str, Any]]:
        """Let both containers report; ``fields``: of the further host."""
        both = []
        for number, (url, process) in enumerate(zip((self.first, self.second), processes, strict=True)):
            query = {"process": process, "round": self.rounds[number]} | (fields if number else {})
            both.append(httpx.get(f"{url}/hostz", params=query).raise_for_status().json())
        return both

    def start(self) -> None:
        self.report()
        self.rounds = [answer["round"] for answer in self.report()]
        self.report()


@pytest.fixture
def pair(server: str) -> Pair:
    return Pair(server)


def parts() -> HostParts:
    return HostParts(PartSource(Fetcher(1), 1 << 20, None, 1, Detours("http://127.0.0.1:9")), 1)


def ready(url: str) -> bool:
    return httpx.get(f"{url}/readyz").status_code == 200


def test_both_hosts_get_the_same_round_and_the_leaders_address(pair: Pair) -> None:
    alone, _ = pair.report()
    assert alone["round"] == "", "one host alone starts nothing"
    first, second = pair.report()
    assert first == second and first["round"] and first["rendezvous"] == "10.0.0.7:20000"
    status = AgentStatus.model_validate(httpx.get(f"{pair.first}/v1/status").json())
    assert [(h.host, h.pod, h.state) for h in status.hosts] == [
        (0, "pod-a", HostState.WAITING), (1, "pod-b", HostState.WAITING)
    ]  # fmt: skip


def test_a_lost_further_host_takes_the_engine_out_of_service_though_its_server_answers(pair: Pair) -> None:
    pair.agent.watch()
    status = pair.agent.status()
    assert (status["state"], status["reason"]) == (EngineState.RESTARTING, "waiting for host 0, 1 of 2")
    pair.start()
    pair.agent.watch()
    assert pair.agent.status()["state"] == EngineState.STALE
    pair.rounds[1] = ""
    pair.report(ended=pair.rounds[0], error="CUDA error")
    pair.agent.watch()
    status = pair.agent.status()
    assert status["state"] == EngineState.RESTARTING and status["restarts"] == 1
    assert status["reason"].startswith("pod-b: the server ended: CUDA error")


def test_hosts_that_wait_are_alive_and_not_ready(pair: Pair) -> None:
    pair.report()
    for url in (pair.first, pair.second):
        assert httpx.get(f"{url}/enginez").status_code == 200, "kubelet must not restart it"
        assert httpx.get(f"{url}/healthz").status_code == 200 and not ready(url)


def test_agents_and_the_api_have_the_same_default() -> None:
    assert EngineSpec().start_seconds == START_SECONDS == EnginePlace().start_seconds


def test_hosts_whose_servers_start_for_too_long_are_restarted(pair: Pair) -> None:
    """engine.startSeconds limits the start of both servers, and not the wait for the other host."""
    further = FurtherHost(1, "pod-b", pair.first, lambda: False, start_seconds=0.2)
    hosts = HostRendezvous(2)
    place = EnginePlace("10.0.0.7", hosts, start_seconds=0.2)
    engine = Engine(NOTHING, 1, None, hosts)
    agent = Agent("pod-a", engine, 2, 1 << 20, 1, place=place)
    further.report({"process": "y"})
    time.sleep(0.3)
    assert further.lives() and agent.engine_lives(), "they wait"
    pair.report()
    assert further.report({"process": "y"})["round"]
    hosts.report(HostReport(0, "pod-a", "x"))
    assert hosts.report(HostReport(1, "pod-b", "y")), "a round"
    assert further.lives() and agent.engine_lives(), "they start"
    time.sleep(0.3)
    assert not further.lives() and not agent.engine_lives()


def test_a_further_host_whose_server_does_not_answer_any_more_is_restarted(pair: Pair) -> None:
    up = [False]
    further = FurtherHost(1, "pod-b", pair.first, lambda: up[0])
    pair.report()
    further.report({"process": "y"})
    pair.report()
    assert further.report({"process": "y"})["round"]
    assert further.lives(), "it starts"
    up[0] = True
    assert further.lives()
    up[0] = False
    assert not further.lives()


def test_a_pod_without_its_hosts_number_names_the_remedy() -> None:
    command = [sys.executable, "-m", "grpo_worker.weightsync.main", "rollout", "--hosts", "2", "--host-index"]
    done = subprocess.run([*command, ""], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2 and "feature gate RayMultiHostIndexing" in done.stderr


def test_without_the_leader_a_report_is_not_answered() -> None:
    app = application(FurtherHost(1, "pod-b", NOTHING, lambda: False), parts())
    url = serve_app(app)
    assert httpx.get(f"{url}/hostz", params={"process": "y"}).status_code == 503
    assert not ready(url)


@pytest.mark.parametrize("further", [False, True])
def test_only_the_pods_own_container_may_report(pair: Pair, further: bool) -> None:
    first = rollout_application(pair.agent, None, pair.place)
    app = application(pair.further, parts()) if further else first
    with TestClient(app, client=("10.0.0.9", 4000)) as client:
        assert client.get("/hostz", params={"process": "y"}).status_code == 403
