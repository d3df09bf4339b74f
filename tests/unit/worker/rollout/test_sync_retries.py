"""Engines that fail to take a version are tried again ever more rarely, and the failures are counted."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from grpo_operator.api.v1alpha1.status import EngineState
from grpo_worker.rollout.engine_pool import POLL_SECONDS, RolloutPool, SyncError, Target
from grpo_worker.rollout.routing import EngineEntry
from support.clocks import FakeClock

UPDATE_SECONDS = 0.1
FIRST = Target(1, {0: "http://trainer"})


class InlineThreads:
    """An executor that runs each call at once."""

    def submit(self, call: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        done: Future[Any] = Future()
        done.set_result(call(*arguments))
        return done

    def map(self, call: Callable[[Any], Any], over: list[Any]) -> list[Any]:
        return [call(each) for each in over]


class FailingPool(RolloutPool):
    """A pool of engines whose agents answer an update with an error, or do not answer it.

    ``tries``: time, engine and version of each.
    """

    def __init__(self, *names: str, silent: bool = False) -> None:
        self.clock = FakeClock()
        self.engines = {name: EngineEntry(name, name, EngineState.STALE, None) for name in names}
        self.tries: list[tuple[float, str, int]] = []
        self.silent, self.problem = silent, "the trainers' pod is silent"
        super().__init__("service", len(names), len(names), "job-1", fp8=False, clock=self.clock)
        self._threads = InlineThreads()  # type: ignore[assignment]
        self.table.replace(list(self.engines.values()))

    def _poll_forever(self) -> None: ...

    def _addresses(self) -> list[str]:
        return list(self.engines)

    def _status_of(self, address: str) -> EngineEntry | None:
        return self.engines[address]

    def _post(self, engine: EngineEntry, route: str, timeout: float, body: dict[str, Any]) -> dict[str, Any]:
        self.tries.append((self.clock.now() - 1000, engine.name, body["version"]))
        self.clock.sleep(UPDATE_SECONDS)
        if self.silent:
            raise SyncError(f"{engine.name}: no answer")
        return {"error": self.problem} if self.problem else {}

    def poll_for(self, seconds: float) -> list[tuple[float, str, int]]:
        """Poll as the pool's thread does; return the tries in this time."""
        before, until = len(self.tries), self.clock.now() + seconds
        while self.clock.now() < until:
            self._poll()
            self.clock.sleep(POLL_SECONDS)
        return self.tries[before:]


def _pauses(tries: list[tuple[float, str, int]]) -> list[float]:
    return [later[0] - earlier[0] for earlier, later in pairwise(tries)]


@pytest.mark.parametrize("silent", [False, True], ids=["error", "no answer"])
def test_pauses_double_up_to_a_minute(silent: bool) -> None:
    pool = FailingPool("a", silent=silent)
    pool._target = FIRST
    pauses = _pauses(pool.poll_for(600))
    wanted = [1, 2, 4, 8, 16, 32, 60, 60, 60, 60, 60, 60, 60]
    assert all(pause == pytest.approx(want, abs=1) for pause, want in zip(pauses, wanted, strict=False))
    assert 12 <= len(pauses) <= 14


def test_each_engine_has_its_own_pause() -> None:
    pool = FailingPool("a")
    pool._target = FIRST
    pool.poll_for(120)
    pool.engines["b"] = EngineEntry("b", "b", EngineState.STALE, None)
    assert pool.poll_for(1)[0][1] == "b"


def test_a_replaced_engine_and_another_target_are_tried_at_once() -> None:
    pool = FailingPool("a")
    pool._target = FIRST
    pool.poll_for(300)
    pool.engines["a"] = replace(pool.engines["a"], restarts=1)
    assert [version for *_, version in pool.poll_for(3)] == [1, 1]
    pool.poll_for(300)
    pool._target = Target(2, FIRST.sources)
    assert [version for *_, version in pool.poll_for(3)] == [2, 2]
    pool.poll_for(300)
    pool._target = Target(2, {0: "http://another-trainer"})
    assert len(pool.poll_for(3)) == 2


def test_a_success_ends_the_pauses() -> None:
    pool = FailingPool("a")
    pool._target = FIRST
    pool.poll_for(300)
    pool.problem = ""
    pool.poll_for(61)
    pool.problem = "again"
    assert _pauses(pool.poll_for(6))[0] == pytest.approx(1, abs=0.6)


def test_a_shortage_counts_the_failures() -> None:
    pool = FailingPool("a")
    pool._target = FIRST
    pool.engines["a"] = replace(pool.engines["a"], reason="update failed")
    pool.poll_for(20)
    assert pool.shortage(1).endswith(": a STALE (update failed; 5 updates failed, now 16 s apart)")


def test_retries_do_not_prolong_the_wait_for_enough_engines() -> None:
    """Each update takes longer than the pauses, so that one is always under way."""
    pool = FailingPool("a")
    sleep = pool.clock.sleep

    def update_while_waiting(seconds: float) -> None:
        sleep(seconds)
        pool._syncing.add("a")

    pool._sync(pool.engines["a"], FIRST)
    pool.clock.sleep = update_while_waiting  # type: ignore[method-assign]
    with pytest.raises(SyncError, match="after 480 s, 0 of minAvailable=1 engines serve version 1: a STALE"):
        pool.serve(FIRST, 480)
    assert pool.clock.now() < 1000 + 490
