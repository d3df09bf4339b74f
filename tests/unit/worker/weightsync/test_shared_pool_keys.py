"""The key between a shared pool and the job that it serves."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette

from grpo_operator.api.names import writer
from grpo_worker.common.auth import headers, pair_headers, served
from grpo_worker.weightsync.agent.agent import Agent
from grpo_worker.weightsync.agent.engine_client import Engine
from grpo_worker.weightsync.agent.engine_place import EnginePlace
from grpo_worker.weightsync.agent.further_host import FurtherHost
from grpo_worker.weightsync.agent.host_rendezvous import HostRendezvous, HostReport
from grpo_worker.weightsync.agent.http import rollout_application
from grpo_worker.weightsync.trainer.agent import application as trainer_agent
from support.pod_keys import PodKeys, first_epochs, owner

MASTER = "m" * 64
A, B = owner("GRPOJob", "a", "aaaaaaaa-1"), owner("GRPOJob", "b", "bbbbbbbb-1")
POOL = owner("RolloutPool", "shared", "cccccccc-1")


class World:
    """Key files of a pool and of two jobs that use it."""

    def __init__(self, folder: Path) -> None:
        epochs = first_epochs(300)
        self.a = PodKeys(folder / "a", MASTER, A, epochs, "shared")
        self.b = PodKeys(folder / "b", MASTER, B, epochs, "shared")
        self.pool = PodKeys(folder / "pool", MASTER, POOL, epochs)
        with self.a.inside():
            self.from_a, self.own_of_a = pair_headers(), headers()
        with self.b.inside():
            self.from_b = pair_headers()


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def _status(app: Starlette, path: str, sent: dict[str, str], body: object = None) -> int:
    async def ask() -> int:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://pod") as client:
            method = "GET" if body is None else "POST"
            return (await client.request(method, path, headers=sent, json=body)).status_code

    return asyncio.run(ask())


def _engine(place: EnginePlace | None = None) -> Agent:
    return Agent("engine-0", Engine("http://127.0.0.1:9", 1), 1, 1 << 20, 1, place=place)


@contextmanager
def _bound(world: World, app: Starlette, to: str) -> Iterator[None]:
    """Be the pod of the pool's agent, which the operator has bound to a job."""
    with world.pool.inside():
        assert _status(app, "/v1/writer", headers(), {"writer": to}) == 200
        yield


def test_an_agent_admits_the_job_that_it_serves_and_its_own_pool(world: World) -> None:
    app = rollout_application(_engine())
    with world.pool.inside():
        assert served() is None
        assert _status(app, "/v1/model", world.from_a) == 401, "before any job is bound"
    for job, good, bad in ((A, world.from_a, world.from_b), (B, world.from_b, world.from_a)):
        with _bound(world, app, writer(job)):
            assert _status(app, "/v1/model", good) == 404, "admitted: there is no config.json"
            assert _status(app, "/v1/model", bad) == 401
            assert _status(app, "/v1/model", world.own_of_a) == 401, "no job shows its own key to a pool"
            assert _status(app, "/v1/model", headers()) == 404


def test_no_job_binds_the_pool(world: World) -> None:
    app = rollout_application(_engine())
    with _bound(world, app, writer(A)):
        assert _status(app, "/v1/writer", world.from_a, {"writer": "x"}) == 401
        assert served() == writer(A)


def test_a_trainer_lets_the_pool_read_weights_of_its_own_turn_and_nothing_else(
    world: World, tmp_path: Path
) -> None:
    app = trainer_agent(tmp_path)
    with world.pool.inside(serves=writer(A)):
        from_pool, own_of_pool = pair_headers(), headers()
    with world.pool.inside(serves=writer(B)):
        in_the_turn_of_b = pair_headers()
    with world.a.inside():
        for path in ("/v1/versions", "/v1/weights/1/0.json", "/v1/weights/1/0.bin", "/v1/weights/1/0.delta"):
            assert _status(app, path, from_pool) != 401
            assert _status(app, path, in_the_turn_of_b) == _status(app, path, own_of_pool) == 401
        for path in ("/v1/snapshots/1.0/0.json", "/v1/snapshots/1.0/0.safetensors"):
            assert _status(app, path, from_pool) == 401 and _status(app, path, world.own_of_a) == 404
        assert _status(app, "/v1/snapshots/seals", from_pool, {}) == 401


def test_a_further_host_learns_which_job_the_pool_serves(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = EnginePlace(hosts=HostRendezvous(2))
    agent = _engine(place)
    with world.pool.inside():
        agent.bind(writer(A))
        answer = place.answer(HostReport(1, "engine-0-1", "p"), False)
    further = FurtherHost(1, "engine-0-1", "http://first", lambda: True)
    transport = httpx.MockTransport(lambda _: httpx.Response(200, json=answer))
    monkeypatch.setattr(further, "_http", httpx.Client(transport=transport, base_url="http://first"))
    with world.pool.inside():
        further.report({"process": "p"})
        assert served() == writer(A)


def test_the_agent_of_an_own_engine_uses_the_key_of_its_job(world: World) -> None:
    with world.a.inside():
        Agent("engine-0", Engine("http://127.0.0.1:9", 1), 1, 1 << 20, 1, writer(A))
        assert served() is None


def test_a_restarted_agent_remembers_the_job(world: World, tmp_path: Path) -> None:
    file = tmp_path / "writer.json"
    Agent("engine-0", Engine("http://127.0.0.1:9", 1), 1, 1 << 20, 1, writer_file=file).bind(writer(A))
    with world.pool.inside():
        Agent("engine-0", Engine("http://127.0.0.1:9", 1), 1, 1 << 20, 1, writer_file=file)
        assert served() == writer(A)
