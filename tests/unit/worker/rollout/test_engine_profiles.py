"""Traces of engines: from the engine's server over its agent into the job's store."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from grpo_operator.api.v1alpha1.status import EngineState
from grpo_worker.common import auth
from grpo_worker.rollout.engine_profiles import EngineProfileError, EngineProfiles
from grpo_worker.rollout.routing import EngineEntry, EngineTable
from grpo_worker.weightsync.agent import engine_profiles, http
from grpo_worker.weightsync.agent.agent import Agent
from grpo_worker.weightsync.agent.engine_client import Engine
from support.clocks import FakeClock
from support.engine_server import JOB, serve_app

FILES = ("a-TP-0.trace.json.gz", "a-TP-1.trace.json.gz")


class Server:
    """An engine's server. ``asked``: bodies of requests for profiles. ``problem``: why it refuses them."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.problem = ""
        self.url = serve_app(
            Starlette(
                routes=[
                    Route("/start_profile", self._start, methods=["POST"]),
                    Route("/server_info", lambda _: JSONResponse({})),
                ]
            )
        )

    def record(self, *names: str) -> None:
        for name in names:
            (Path(self.asked[-1]["output_dir"]) / name).write_text(f"trace {name}")

    async def _start(self, request: Request) -> Response:
        if self.problem:
            return PlainTextResponse(self.problem, 500)
        self.asked.append(await request.json())
        return PlainTextResponse("Start profiling.\n")


class Waits(FakeClock):
    """Time of which each wait begins with the next of ``meanwhile``."""

    def __init__(self) -> None:
        super().__init__()
        self.meanwhile: list[Callable[[], None]] = []

    def sleep(self, seconds: float) -> None:
        if self.meanwhile:
            self.meanwhile.pop(0)()
        super().sleep(seconds)


class Pool:
    """One engine of two ranks with its agent, and the controller's part."""

    def __init__(self, folder: Path) -> None:
        self.server, self.folder = Server(), folder
        engine = Engine(self.server.url, 30)
        profiles = engine_profiles.EngineProfiles(engine, 2, folder / "model" / "profile")
        agent = Agent("pool-0", engine, 2, 1 << 20, 30, JOB)
        port = int(serve_app(http.rollout_application(agent, profiles=profiles)).rpartition(":")[2])
        self.table, self.clock, self.attempt = EngineTable(), Waits(), 1
        self.table.update(EngineEntry("pool-0", "127.0.0.1", EngineState.SERVING, 3))
        self.profiles = EngineProfiles(self.table, JOB, lambda: self.attempt, self.clock, port)

    def record(self, identity: str = "a", *engines: str) -> list[str]:
        return self.profiles.record(identity, engines, 5, self.folder / "store" / identity)


@pytest.fixture
def pool(tmp_path: Path) -> Pool:
    return Pool(tmp_path)


def test_the_files_of_all_ranks_are_fetched_when_they_are_complete(pool: Pool) -> None:
    pool.clock.meanwhile = [partial(pool.server.record, name) for name in FILES]
    names = pool.record()
    assert names == ["engine-pool-0-TP-0.trace.json.gz", "engine-pool-0-TP-1.trace.json.gz"]
    stored = pool.folder / "store" / "a"
    assert [(stored / name).read_text() for name in names] == [f"trace {name}" for name in FILES]
    (asked,) = pool.server.asked
    assert asked["num_steps"] == 5 and asked["start_step"] == 1 and asked["profile_id"] == "a"


def test_the_files_of_the_profile_before_are_removed(pool: Pool) -> None:
    for identity in ("a", "b"):
        pool.clock.meanwhile = [partial(pool.server.record, *FILES)]
        pool.record(identity)
    assert [path.name for path in (pool.folder / "model" / "profile").iterdir()] == ["b"]


def test_an_engine_that_restarts_has_recorded_nothing(pool: Pool) -> None:
    restarted = EngineEntry("pool-0", "127.0.0.1", EngineState.STALE, None, restarts=1)
    pool.clock.meanwhile = [partial(pool.table.update, restarted)]
    with pytest.raises(EngineProfileError, match="pool-0: the engine was restarted before it had recorded"):
        pool.record()


def test_the_refusal_of_a_server_is_quoted_and_the_engine_stays_in_use(pool: Pool) -> None:
    pool.server.problem = "Profiling is already in progress."
    with pytest.raises(EngineProfileError, match=r"pool-0: /start_profile: HTTP 500: Profiling is already"):
        pool.record()
    entry = pool.table.entry("pool-0")
    assert entry is not None and entry.state is EngineState.SERVING


def test_engines_are_chosen_by_name_or_because_they_serve(pool: Pool) -> None:
    with pytest.raises(
        EngineProfileError, match="engines=pool-9: the pool has no such engine: use one of pool-0"
    ):
        pool.record("a", "pool-9")
    pool.table.update(EngineEntry("pool-0", "127.0.0.1", EngineState.STALE, None))
    with pytest.raises(EngineProfileError, match="no engine serves: ask again"):
        pool.record()


def test_another_job_and_callers_without_the_key_are_refused(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pool.profiles._writer = "other-87654321"
    with pytest.raises(EngineProfileError, match="job other-87654321 may not write"):
        pool.record()
    monkeypatch.setenv(auth.FILE, str(tmp_path / "no-key"))
    with pytest.raises(EngineProfileError, match="the key of this job's or pool's pods is needed"):
        pool.record()
    assert pool.server.asked == []


@pytest.mark.parametrize("name", ["..", ".hidden", "a/b", ""])
def test_only_files_of_profiles_can_be_read(pool: Pool, name: str) -> None:
    profiles = engine_profiles.EngineProfiles(Engine(pool.server.url, 1), 1, pool.folder)
    with pytest.raises(engine_profiles.ProfileError, match="is no name of a profile"):
        profiles.path("a", name)
