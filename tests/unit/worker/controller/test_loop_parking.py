"""The loop while engines are away: the trainers are parked, nothing restarts, and the ledger is the same."""

import itertools
import threading
from pathlib import Path
from typing import Any

import pytest

from grpo_operator.api.messages import ControllerStatus
from grpo_operator.api.v1alpha1.status import Phase
from grpo_worker.rollout.engine_pool import Target
from grpo_worker.rollout.sampling import Sample
from support.loop_world import World
from support.parking import OUTAGE, away_during_generation, die_while_waiting, without_attempts


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    world = World(tmp_path_factory.mktemp("calm"))
    ledger = world.run()
    assert world.board.get().phase == Phase.SUCCEEDED and world.board.get().step == 6
    assert world.board.get().times_parked == 0 and world.starts == 1
    return ledger


@pytest.mark.fault(
    row="27",
    point="no engine is reached for two hours",
    witness="parked once, with the reason",
    compared="ledger of an undisturbed run",
    partial="stand-in ranks and engines",
)
def test_engines_that_are_away_for_hours_cost_time_and_nothing_else(
    tmp_path: Path, calm: list[dict[str, Any]]
) -> None:
    world = World(tmp_path)
    away_during_generation(world, version=2)
    ledger = world.run()
    status = world.board.get()
    assert ledger == calm, "the same samples of the same attempt, each once"
    assert status.phase == Phase.SUCCEEDED and status.attempt == 1 and status.times_parked == 1
    assert status.restarts.infrastructure == status.restarts.job == 0
    assert world.starts == 1 and len(world.groups) == 1, "no rank was started again"
    assert world.clock.now() >= 1000 + OUTAGE
    assert world.calls.count("load_checkpoint") == 0

    parked = [seen for seen in world.seen if seen.waiting]
    assert {seen.phase for seen in parked} == {Phase.RECOVERING}
    assert all("engine-0 RESTARTING" in seen.waiting or "no engine serves" in seen.waiting for seen in parked)
    assert parked[0].message == parked[0].waiting and parked[0].waiting.startswith("waiting since 2")
    assert status.waiting == ""
    # Steps 4 and 6 (the last) are due; step 2 was saved once, because the trainers were parked.
    assert world.calls.count("save_checkpoint") == 3
    assert (tmp_path / "checkpoints" / "step-00000002.attempt-1" / "COMMITTED").is_file()


def test_an_engine_that_is_late_at_the_first_push_costs_no_start_of_the_trainers(
    tmp_path: Path, calm: list[dict[str, Any]]
) -> None:
    world = World(tmp_path)
    world.away = lambda: "no engine found" if world.clock.now() < 1000 + OUTAGE else ""
    assert world.run() == calm
    status = world.board.get()
    assert (world.starts, status.attempt, status.times_parked) == (1, 1, 1)
    starting = [seen for seen in world.seen if seen.waiting]
    assert {seen.phase for seen in starting} == {Phase.STARTING}
    assert "no engine found" in starting[0].message
    assert world.calls.count("save_checkpoint") == 2, "nothing is lost before the first step"


def test_trainers_that_die_while_parked_recover_as_always(tmp_path: Path, calm: list[dict[str, Any]]) -> None:
    world = World(tmp_path)
    away_during_generation(world, version=3)
    die_while_waiting(world)
    assert without_attempts(world.run()) == without_attempts(calm)
    status = world.board.get()
    assert status.phase == Phase.SUCCEEDED and status.attempt == 2 and world.starts == 2
    assert status.restarts.infrastructure == 1
    assert status.restored is not None and status.restored.step == 3, "the checkpoint of the parking"
    assert "rank 1 on trainer-0" in status.last_failure and world.groups[0].killed


def test_a_death_during_generation_is_noticed_at_once_and_the_answers_are_kept(
    tmp_path: Path, calm: list[dict[str, Any]]
) -> None:
    world = World(tmp_path)
    died: list[int] = []

    def before(version: int) -> None:
        if version == 4 and not died:  # the checkpoint of step 4 is complete
            died.append(len(world.groups))
            world.groups[0].died.set_result(None)
            while world.starts < 2:  # answers are generated until the next gang has started
                pass

    world.before_generation = before
    ledger = world.run()
    assert without_attempts(ledger) == without_attempts(calm)
    assert world.board.get().attempt == 2 and world.starts == 2
    per_step = world.spec.data.train_batch_size
    assert len(world.engines.generated) == 6 * per_step, "no answer was generated twice"


def test_a_death_that_loses_steps_discards_the_answers(tmp_path: Path, calm: list[dict[str, Any]]) -> None:
    world = World(tmp_path)
    died: list[int] = []

    def before(version: int) -> None:
        if version == 5 and not died:  # the newest checkpoint is that of step 4
            died.append(len(world.groups))
            world.groups[0].died.set_result(None)

    world.before_generation = before
    assert without_attempts(world.run()) == without_attempts(calm)
    restored = world.board.get().restored
    assert restored is not None and restored.step == 4


def test_back_off_and_reason_are_in_the_status(tmp_path: Path) -> None:
    world = World(tmp_path)
    deaths = itertools.count()

    def before(version: int) -> None:
        if version == 1 and next(deaths) < 4:
            world.groups[-1].died.set_result(None)
            raise RuntimeError("the connection to the gang is lost")

    world.before_generation = before
    world.run()
    status = world.board.get()
    assert status.phase == Phase.SUCCEEDED
    assert status.restarts.job + status.restarts.infrastructure == 4
    waits = [seen for seen in world.seen if seen.next_attempt]
    assert waits and all(seen.phase == Phase.RECOVERING and seen.last_failure for seen in waits)
    assert status.next_attempt == "", "it is over"
    delays = {seen.recent_failures: seen.backoff_seconds for seen in world.seen}
    assert delays == {0: 0, 1: 5, 2: 10, 3: 20, 4: 40}
    counted = [count for count, _ in itertools.groupby(seen.recent_failures for seen in world.seen)]
    assert counted == [0, 1, 2, 3, 4, 3, 2, 1, 0], "each new step takes one away, from step 2 on"
    assert world.clock.now() - 1000 >= 5 + 10 + 20


def test_a_parked_job_can_be_suspended_and_resumed(tmp_path: Path, calm: list[dict[str, Any]]) -> None:
    world = World(tmp_path)
    away_during_generation(world, version=2)
    sleep, polls = world.clock.sleep, itertools.count()
    suspended: list[ControllerStatus] = []

    def sleep_and_suspend(seconds: float) -> None:
        sleep(seconds)
        if next(polls) == 20:
            world.board.request_suspend(True)

    def wait_until_resumed() -> None:
        suspended.append(world.board.get())
        world.board.request_suspend(False)

    world.clock.sleep = sleep_and_suspend  # type: ignore[method-assign]
    world.board.wait_until_resumed = wait_until_resumed  # type: ignore[method-assign]
    assert world.run() == calm
    (status,) = suspended
    assert (status.phase, status.message) == (Phase.SUSPENDED, "checkpoint of step 2 is complete")


def test_a_death_while_engines_load_a_staged_version_is_noticed_at_once(
    tmp_path: Path, calm: list[dict[str, Any]]
) -> None:
    world = World(tmp_path)
    serve, restarted = world.engines.serve, threading.Event()

    def serve_slowly(target: Target, timeout: float) -> dict[str, float]:
        if target.version == 4 and world.starts == 1:  # the checkpoint of step 4 is not complete yet
            world.groups[0].died.set_result(None)
            assert restarted.wait(30), "the next gang does not start"
        return serve(target, timeout)

    def hold() -> None:
        if world.starts:
            restarted.set()  # a new attempt ends the waits of the one before

    world.engines.serve, world.engines.hold = serve_slowly, hold  # type: ignore[method-assign]
    assert without_attempts(world.run()) == without_attempts(calm)
    status = world.board.get()
    assert (status.attempt, world.starts, status.restarts.infrastructure) == (2, 2, 1)
    assert "rank 1 on trainer-0" in status.last_failure


@pytest.mark.fault(
    row="25",
    point="the reward server refuses three requests",
    witness="the message names it; parked once",
    compared="ledger of an undisturbed run",
    partial="stand-in ranks and server",
)
def test_a_reward_server_that_is_away_parks_the_trainers_too(
    tmp_path: Path, calm: list[dict[str, Any]]
) -> None:
    world = World(tmp_path)
    score, tries = world.engines.score, itertools.count()

    def away_at_first(samples: list[Sample]) -> list[float]:
        if next(tries) in (2, 3, 4):
            raise ConnectionError("http://verifier: start the server, or correct the address")
        return score(samples)

    world.engines.score = away_at_first  # type: ignore[method-assign]
    assert world.run() == calm
    status = world.board.get()
    assert (status.times_parked, status.attempt, world.starts) == (1, 1, 1)
    assert any("http://verifier" in seen.waiting for seen in world.seen)
