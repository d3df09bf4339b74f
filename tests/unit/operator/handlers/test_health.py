"""The answers of the probes and the gauges, with their reasons."""

from collections.abc import AsyncIterator

import aiohttp
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from grpo_operator import __version__
from grpo_operator.handlers.health import (
    READY_SECONDS,
    RESTART_SECONDS,
    Health,
    HealthCollector,
    HealthServer,
)
from grpo_operator.observe.freshness import Problem
from support.clocks import FakeClock


class _State:
    """The operator as the probes see it; ``health`` judges it."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.last_pass: float | None = self.clock.now()
        self.waiting, self.longest = "", 0.0
        self.kinds = {"pods": 0.0, "nodes": 0.0}
        self.found: dict[str, Problem] = {}
        self.health = Health(self, self, lambda: self.waiting, self.clock.now)

    def longest_reconcile(self) -> float:
        return self.longest

    def ages(self) -> dict[str, float]:
        return self.kinds

    def problems(self) -> dict[str, Problem]:
        return self.found


@pytest.fixture
def state() -> _State:
    return _State()


@pytest.fixture
async def url(state: _State) -> AsyncIterator[str]:
    server = HealthServer(state.health, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{await server.start()}"
    await server.stop()


async def _asked(url: str) -> dict[str, tuple[int, str]]:
    answers = {}
    async with aiohttp.ClientSession() as session:
        for path in ("healthz", "readyz"):
            async with session.get(f"{url}/{path}") as answer:
                answers[path] = answer.status, await answer.text()
    return answers


async def test_a_working_operator_is_alive_and_ready_however_long_one_reconcile_takes(
    state: _State, url: str
) -> None:
    state.longest = 1e6
    assert await _asked(url) == {"healthz": (200, "ok\n"), "readyz": (200, "ok\n")}


async def test_an_operator_that_starts_is_alive_and_says_what_it_waits_for(state: _State, url: str) -> None:
    state.last_pass, state.waiting = None, "3 pods, first team-a/x"
    state.clock.sleep(10 * RESTART_SECONDS)
    answers = await _asked(url)
    assert answers["healthz"][0] == 200
    assert answers["readyz"] == (503, "starting: the cache waits for 3 pods, first team-a/x\n")


async def test_a_loop_that_stands_still_is_first_unready_and_then_dead(state: _State, url: str) -> None:
    state.clock.sleep(READY_SECONDS + 1)
    answers = await _asked(url)
    assert answers["healthz"][0] == 200
    assert answers["readyz"] == (503, "the last pass of the reconcile loop was 91 s ago\n")
    state.clock.sleep(RESTART_SECONDS)
    stopped = (503, "the last pass of the reconcile loop was 391 s ago\n")
    assert await _asked(url) == {"healthz": stopped, "readyz": stopped}


@pytest.mark.parametrize(
    ("problem", "alive"),
    [
        (Problem("pods cannot be listed: 403 forbidden", silent=False), 200),
        (Problem("the watch of pods does not deliver 2 listed objects", silent=True), 503),
        (None, 200),
    ],
    ids=["a right is missing", "the watch is silent", "the API server is away"],
)
async def test_only_a_silent_watch_is_a_reason_for_a_restart(
    state: _State, url: str, problem: Problem | None, alive: int
) -> None:
    state.kinds["pods"] = RESTART_SECONDS + 1
    state.found = {"pods": problem} if problem else {}
    answers = await _asked(url)
    assert answers["healthz"][0] == alive and answers["readyz"][0] == 503
    text = problem.text if problem else "pods: no event and no successful listing"
    assert answers["readyz"][1] == f"{text} (for 301 s)\n"


async def test_a_problem_that_may_pass_is_not_reported_at_once(state: _State, url: str) -> None:
    state.kinds["pods"] = READY_SECONDS - 1
    state.found = {"pods": Problem("the watch of pods does not deliver", silent=True)}
    assert {code for code, _ in (await _asked(url)).values()} == {200}


def test_the_gauges_show_the_ages(state: _State) -> None:
    registry = CollectorRegistry()
    registry.register(HealthCollector(state.health))
    state.clock.sleep(7)
    state.kinds["pods"], state.longest = 12.0, 3.0
    text = generate_latest(registry).decode()
    for line in (
        f'grpo_build_info{{version="{__version__}"}} 1.0',
        "grpo_loop_age_seconds 7.0",
        "grpo_longest_reconcile_seconds 3.0",
        'grpo_cache_age_seconds{kind="pods"} 12.0',
    ):
        assert line in text.splitlines()
    state.last_pass = None
    lines = generate_latest(registry).decode().splitlines()
    assert not [line for line in lines if line.startswith("grpo_loop_age_seconds")]
