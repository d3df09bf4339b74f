"""The controller's view of the pool: who is missing, and waits on virtual time."""

from typing import Any

import pytest

from grpo_operator.api.v1alpha1.status import EngineState
from grpo_worker.rollout.engine_pool import MixedWeightsError, RolloutPool, SyncError, Target
from grpo_worker.rollout.routing import EngineEntry
from support.clocks import FakeClock


class QuietPool(RolloutPool):
    """A pool whose engines are set by the test and are asked for nothing."""

    def _poll_forever(self) -> None: ...

    def _post(self, engine: EngineEntry, route: str, timeout: float, body: dict[str, Any]) -> dict[str, Any]:
        return {}


def _pool(*entries: EngineEntry, clock: FakeClock | None = None) -> RolloutPool:
    pool = QuietPool("service", 2, 2, "job-1", fp8=False, clock=clock or FakeClock())
    pool.table.replace(list(entries))
    return pool


def _engine(name: str, state: EngineState, version: int | None = None, **more: Any) -> EngineEntry:
    return EngineEntry(name, "10.0.0.1", state, version, **more)


SERVING, STALE = EngineState.SERVING, EngineState.STALE


def test_a_shortage_names_the_engines_and_their_reasons() -> None:
    lost = _engine("b", EngineState.RESTARTING, reason="engine does not answer")
    pool = _pool(_engine("a", SERVING, 7), lost, _engine("c", SERVING, 6))
    assert pool.shortage(7) == (
        "1 of minAvailable=2 engines serve version 7: b RESTARTING (engine does not answer), c SERVING"
    )
    assert pool.shortage(6).startswith("1 of minAvailable=2")
    assert _pool().shortage(7).endswith("no engine found")
    assert _pool(_engine("a", SERVING, 7), _engine("b", SERVING, 7)).shortage(7) == ""


def test_a_shortage_of_512_engines_is_one_short_line() -> None:
    engines = [_engine(f"engine-{number}", STALE, reason="x" * 50) for number in range(512)]
    text = _pool(*engines).shortage(7)
    assert text.endswith("and 504 more") and len(text) < 1024


def test_too_few_engines_are_an_error_after_the_timeout_of_the_clock() -> None:
    clock = FakeClock()
    pool, began = _pool(_engine("a", SERVING, 7), _engine("b", STALE), clock=clock), clock.now()
    with pytest.raises(SyncError, match="after 480 s, 1 of minAvailable=2 engines serve version 7: b STALE"):
        pool.serve(Target(7, {}), 480)
    assert 480 <= clock.now() - began < 481


def test_an_update_that_goes_on_does_not_run_out_of_time() -> None:
    clock = FakeClock()
    pool, sleep = _pool(_engine("a", SERVING, 7), _engine("b", STALE), clock=clock), clock.sleep
    pool._syncing.add("b")

    def end_late(seconds: float) -> None:
        sleep(seconds)
        if clock.now() > 10_000:
            pool.table.replace([_engine(name, SERVING, 7) for name in "ab"])

    clock.sleep = end_late  # type: ignore[method-assign]
    pool.serve(Target(7, {}), 480)
    assert clock.now() > 10_000


def test_a_wait_for_engines_ends_when_another_attempt_begins() -> None:
    clock = FakeClock()
    pool, sleep = _pool(clock=clock), clock.sleep

    def hold_soon(seconds: float) -> None:
        sleep(seconds)
        if clock.now() > 1010:
            pool.hold()

    clock.sleep = hold_soon  # type: ignore[method-assign]
    with pytest.raises(SyncError, match="no longer the one to serve"):
        pool.serve(Target(7, {}), 480)
    assert clock.now() < 1011


def test_engines_with_different_weights_are_no_shortage() -> None:
    pool = _pool(_engine("a", SERVING, 7, checksum="1"), _engine("b", SERVING, 7, checksum="2"))
    with pytest.raises(MixedWeightsError, match="different weights at version 7"):
        pool.serve(Target(7, {}), 480)


class TurnedPool(QuietPool):
    """A pool whose looks and turns are answered by the agents of ``alive`` addresses."""

    alive = ("10.0.0.1", "10.0.0.2")
    pods = ("10.0.0.1", "10.0.0.2")

    def _addresses(self) -> list[str]:
        return list(self.pods)

    def _status_of(self, address: str) -> EngineEntry | None:
        return EngineEntry(f"engine-{address[-1]}", address, STALE, None) if address in self.alive else None

    def _post(self, engine: EngineEntry, route: str, timeout: float, body: dict[str, Any]) -> dict[str, Any]:
        if engine.address not in self.alive:
            raise SyncError(f"{engine.name} does not answer")
        return {"attempt": 0, "settled": True}


def _turned(clock: FakeClock, **more: Any) -> TurnedPool:
    pool, sleep = TurnedPool("service", 1, 2, "job-1", fp8=False, clock=clock), clock.sleep
    for name, value in more.items():
        setattr(pool, name, value)

    def look(seconds: float) -> None:
        sleep(seconds)
        pool._poll()

    clock.sleep = look  # type: ignore[method-assign]
    pool._poll()
    return pool


def test_trainers_wait_for_an_engine_whose_agent_does_not_answer() -> None:
    clock = FakeClock()
    pool, began = _turned(clock, alive=("10.0.0.1",)), clock.now()
    pool.turn(("weights",), 30)
    with pytest.raises(SyncError, match=r"did not release .* in 30 s: .*the agent at 10\.0\.0\.2"):
        pool.turn((), 30)
    assert clock.now() - began > 30


def test_trainers_do_not_wait_for_an_engine_whose_pod_is_gone() -> None:
    _turned(FakeClock(), alive=("10.0.0.1",), pods=("10.0.0.1",)).turn((), 30)


def test_trainers_go_on_when_a_silent_agent_is_back() -> None:
    clock = FakeClock()
    pool = _turned(clock, alive=("10.0.0.1",))
    look = clock.sleep

    def back(seconds: float) -> None:
        if clock.now() > 1010:
            pool.alive = pool.pods
        look(seconds)

    clock.sleep = back  # type: ignore[method-assign]
    pool.turn((), 30)
    assert 1010 < clock.now() < 1012
