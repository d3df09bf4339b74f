"""Authentication: control routes of pods need their namespace's key."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from grpo_worker.common.auth import FILE, OPEN, headers
from grpo_worker.controller.status.progress import ProgressBoard
from grpo_worker.controller.status.server import application as controller
from grpo_worker.weightsync.agent.agent import Agent
from grpo_worker.weightsync.agent.detours import Detours
from grpo_worker.weightsync.agent.engine_client import Engine
from grpo_worker.weightsync.agent.engine_place import EnginePlace
from grpo_worker.weightsync.agent.fetcher import Fetcher
from grpo_worker.weightsync.agent.further_host import FurtherHost
from grpo_worker.weightsync.agent.further_host import application as further_host
from grpo_worker.weightsync.agent.host_rendezvous import HostRendezvous
from grpo_worker.weightsync.agent.http import rollout_application
from grpo_worker.weightsync.agent.part_routes import HostParts
from grpo_worker.weightsync.agent.part_source import PartSource
from grpo_worker.weightsync.trainer.agent import application as trainer_agent


def _rollout_agent(_: Path) -> Starlette:
    return rollout_application(Agent("engine-0", Engine("http://127.0.0.1:9", 1), 1, 1 << 20, 1))


def _controller(_: Path) -> Starlette:
    return controller(ProgressBoard(), list)


def _first_host(_: Path) -> Starlette:
    place = EnginePlace(hosts=HostRendezvous(2))
    agent = Agent("engine-0", Engine("http://127.0.0.1:9", 1), 1, 1 << 20, 1, place=place)
    return rollout_application(agent, None, place)


def _further_host(_: Path) -> Starlette:
    parts = HostParts(PartSource(Fetcher(1), 1 << 20, None, 1, Detours("http://127.0.0.1:9")), 1)
    return further_host(FurtherHost(1, "engine-0", "http://127.0.0.1:9", lambda: True), parts)


APPLICATIONS: list[Callable[[Path], Starlette]] = [
    _rollout_agent, trainer_agent, _controller, _first_host, _further_host
]  # fmt: skip


@pytest.fixture
def key_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "key"
    file.write_text("open sesame\n")
    monkeypatch.setenv(FILE, str(file))
    return file


def _answers(app: Starlette, sent: dict[str, str] | httpx.Headers) -> dict[str, int]:
    """Return path -> status of every route."""

    async def ask() -> dict[str, int]:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://pod") as client:
            found = {}
            for route in app.routes:
                assert isinstance(route, Route) and route.methods
                method = "POST" if "POST" in route.methods else "GET"
                path = route.path
                for part, value in (
                    ("{version:int}", "1"),
                    ("{rank:int}", "0"),
                    ("{name:str}", "1.0"),
                    ("{suffix:str}", "bin"),
                ):
                    path = path.replace(part, value)
                found[path] = (await client.request(method, path, headers=sent)).status_code
            return found

    return asyncio.run(ask())


@pytest.mark.parametrize("make", APPLICATIONS)
@pytest.mark.parametrize("sent", [b"", b"Bearer open", b"open sesame", b"Bearer \xe9"])
def test_all_routes_but_the_open_ones_need_the_key(
    make: Callable[[Path], Starlette], sent: bytes, key_file: Path, tmp_path: Path
) -> None:
    answers = _answers(make(tmp_path), httpx.Headers([(b"authorization", sent)]))
    assert {path for path, status in answers.items() if status != 401} == OPEN & answers.keys()
    assert 401 in answers.values()


@pytest.mark.parametrize("make", APPLICATIONS)
def test_every_route_accepts_the_key(
    make: Callable[[Path], Starlette], key_file: Path, tmp_path: Path
) -> None:
    assert 401 not in _answers(make(tmp_path), headers()).values()


@pytest.mark.parametrize("make", APPLICATIONS)
def test_a_rotated_key_is_reloaded_and_a_lost_one_admits_nobody(
    make: Callable[[Path], Starlette], key_file: Path, tmp_path: Path
) -> None:
    app, old = make(tmp_path), headers()
    key_file.write_text("another")
    assert 401 in _answers(app, old).values()
    assert 401 not in _answers(app, headers()).values()
    key_file.unlink()
    for sent in (old, headers(), {"authorization": "Bearer "}):
        assert 401 in _answers(app, sent).values()


def test_no_key_is_needed_outside_pods(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(FILE, raising=False)
    assert headers() == {} and 401 not in _answers(trainer_agent(tmp_path), {}).values()
