"""The loop while engines are away: the trainers are parked, nothing restarts, and the ledger is the same."""

import itertools
import json
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from grpo_operator.api.messages import ControllerStatus
from grpo_operator.api.v1alpha1.status import Phase
from grpo_worker.controller.recovery.checkpoints import RunCheckpoints
from grpo_worker.data.routed_experts import RoutedExperts
from grpo_worker.rollout.engine_pool import Target
from grpo_worker.rollout.sampling import Sample
from support.loop_world import Ranks, World

OUTAGE = 7200.0  # seconds


def _without_attempts(ledger: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in entry.items() if key != "attempt"} for entry in ledger]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    world = World(tmp_path_factory.mktemp("calm"))
    ledger = world.run()
    assert world.board.get().phase == Phase.SUCCEEDED and world.board.get().step == 6
    assert world.board.get().times_parked == 0 and world.starts == 1
    return ledger


def _away_during_generation(world: World, version: int) -> None:
    """All engines go away when ``version`` is about to generate, for two hours."""
    until = None

    def away() -> str:
        return "0 of minAvailable=1 engines serve: engine-0 RESTARTING" if until_now() else ""

    def until_now() -> bool:
        return until is not None and world.clock.now() < until

    def before(seen: int) -> None:
        nonlocal until
        if seen == version and until is None:
            until = world.clock.now() + OUTAGE

    world.away, world.before_generation = away, before


def _die_while_waiting(world: World, counts: Callable[[], bool] = lambda: True) -> None:
    """A rank dies at the loop's 51st wait of those for which ``counts`` returns true."""
    sleep, polls = world.clock.sleep, itertools.count()

    def sleep_and_die(seconds: float) -> None:
        sleep(seconds)
        if counts() and next(polls) == 50:
            world.groups[0].died.set_result(None)

    world.clock.sleep = sleep_and_die  # type: ignore[method-assign]


def test_engines_that_are_away_for_hours_cost_time_and_nothing_else(
    tmp_path: Path, calm: list[dict[str, Any]]
) -> None:
    world = World(tmp_path)
    _away_during_generation(world, version=2)
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
    assert (tmp_path / "checkpoints" / "step-00000002" / "COMMITTED").is_file()


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
    _away_during_generation(world, version=3)
    _die_while_waiting(world)
    assert _without_attempts(world.run()) == _without_attempts(calm)
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
    assert _without_attempts(ledger) == _without_attempts(calm)
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
    assert _without_attempts(world.run()) == _without_attempts(calm)
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
    _away_during_generation(world, version=2)
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
    assert _without_attempts(world.run()) == _without_attempts(calm)
    status = world.board.get()
    assert (status.attempt, world.starts, status.restarts.infrastructure) == (2, 2, 1)
    assert "rank 1 on trainer-0" in status.last_failure


@pytest.mark.parametrize("dies", [False, True], ids=["alive", "dead"])
def test_samples_generated_ahead_are_saved_when_the_trainers_are_parked(tmp_path: Path, dies: bool) -> None:
    """Engines go away when they should get version 3; the samples of step 4 exist by then."""
    ahead: dict[str, Any] = {"staleness": {"maxVersionLag": 1}}
    undisturbed = World(tmp_path / "calm", **ahead).run()
    world = World(tmp_path / "parked", **ahead)
    serve = world.engines.serve
    begin: list[float] = []

    def away() -> str:
        lasts = bool(begin) and world.clock.now() < begin[0] + OUTAGE
        return "0 of minAvailable=1 engines serve" if lasts else ""

    def serve_or_leave(target: Target, timeout: float) -> dict[str, float]:
        if target.version == 3 and not begin:
            begin.append(world.clock.now())
        return serve(target, timeout)

    world.away = away
    world.engines.serve = serve_or_leave  # type: ignore[method-assign]
    if dies:
        _die_while_waiting(world, lambda: bool(begin))
    assert _without_attempts(world.run()) == _without_attempts(undisturbed)
    status = world.board.get()
    assert status.phase == Phase.SUCCEEDED and status.attempt == world.starts == 1 + dies
    assert (tmp_path / "parked" / "checkpoints" / "step-00000003" / "COMMITTED").is_file()
    assert (tmp_path / "parked" / "pending" / "step-00000003.npz").is_file()
    assert not dies or (status.restored is not None and status.restored.step == 3)
    assert {entry["version"] for entry in undisturbed if entry["step"] == 4} == {2}, "one step ahead"


@pytest.mark.parametrize("dies", [False, True], ids=["alive", "dead"])
@pytest.mark.parametrize("partial", [False, True], ids=["whole", "partial"])
def test_no_step_is_lost_while_samples_are_generated_ahead(tmp_path: Path, partial: bool, dies: bool) -> None:
    """Engines go away in the middle of the samples of step 4, while step 3 is trained."""
    ahead: dict[str, Any] = {"staleness": {"maxVersionLag": 1, "partialRollouts": partial}}
    undisturbed = World(tmp_path / "calm", **ahead).run()
    world = World(tmp_path / "parked", **ahead)
    _away_during_generation(world, version=2)
    if dies:
        _die_while_waiting(world, lambda: bool(world.away() and world.board.get().times_parked))
    ledger = world.run()
    status = world.board.get()
    assert status.phase == Phase.SUCCEEDED and status.attempt == world.starts == 1 + dies
    assert status.times_parked == 1 + dies
    assert (tmp_path / "parked" / "checkpoints" / "step-00000003" / "COMMITTED").is_file()
    records = [json.loads(line) for line in (tmp_path / "parked" / "metrics.jsonl").open()]
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    if not dies:
        assert ledger == undisturbed
        assert (tmp_path / "parked" / "pending" / "step-00000003.npz").is_file(), "added when it was there"
        assert all(record["weights"] for record in records), "no record is preliminary"
        return
    assert status.restored is not None and status.restored.step == 3
    versions = {entry["version"] for entry in ledger if entry["step"] == status.restored.step + 1}
    assert versions == {status.restored.step}, "by the newest weights"
    assert [entry["uid"] for entry in ledger] == [entry["uid"] for entry in undisturbed]


@pytest.mark.parametrize("partial", [False, True], ids=["whole", "partial"])
def test_a_death_after_engines_came_back_replays_the_same_samples(tmp_path: Path, partial: bool) -> None:
    """The checkpoint of step 3 was saved without the samples of step 4, which were added later."""
    ahead: dict[str, Any] = {"staleness": {"maxVersionLag": 1, "partialRollouts": partial}}
    undisturbed = World(tmp_path / "calm", **ahead).run()
    world = World(tmp_path / "parked", **ahead)
    _away_during_generation(world, version=2)
    leave, died = world.before_generation, threading.Event()

    def leave_or_die(version: int) -> None:
        leave(version)
        if version == 3 and not died.is_set():  # step 4 trains, whose checkpoint is not complete
            died.set()
            world.groups[0].died.set_result(None)

    world.before_generation = leave_or_die
    assert _without_attempts(world.run()) == _without_attempts(undisturbed)
    status = world.board.get()
    assert status.restored is not None and status.restored.step == 3
    assert (status.times_parked, status.attempt) == (1, 2)


@pytest.mark.parametrize("dies", [False, True], ids=["alive", "dead"])
def test_a_checkpoint_whose_samples_are_still_generated_parks_the_trainers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    """Engines go away after new weights, when the checkpoint of step 4 waits for the samples of step 5."""
    changes: dict[str, Any] = {"staleness": {"maxVersionLag": 1, "partialRollouts": True}}
    undisturbed = World(tmp_path / "calm", **changes).run()
    world, after_step = World(tmp_path / "away", **changes), RunCheckpoints.after_step
    left, until = threading.Event(), 0.0

    def leave(checkpoints: RunCheckpoints, step: int, attempt: int) -> None:
        nonlocal until
        if step == 4 and not left.is_set():
            until = world.clock.now() + OUTAGE
            left.set()
        after_step(checkpoints, step, attempt)

    def before(version: int) -> None:
        assert version != 3 or left.wait(30), "the samples of step 5"

    monkeypatch.setattr(RunCheckpoints, "after_step", leave)
    world.away = lambda: "0 of minAvailable=1 engines serve" if world.clock.now() < until else ""
    world.before_generation = before
    if dies:
        _die_while_waiting(world, lambda: bool(world.away() and world.board.get().times_parked))
    ledger = world.run()
    status = world.board.get()
    assert status.phase == Phase.SUCCEEDED and status.attempt == world.starts == 1 + dies
    assert (tmp_path / "away" / "checkpoints" / "step-00000004" / "COMMITTED").is_file()
    if dies:
        assert status.restored is not None and status.restored.step == 4, "saved before those samples"
        assert [entry["uid"] for entry in ledger] == [entry["uid"] for entry in undisturbed]
        return
    assert ledger == undisturbed
    assert status.times_parked == 1 and status.restarts.infrastructure == 0
    assert world.calls.count("save_checkpoint") == 2, "step 4 is saved once"
    assert (tmp_path / "away" / "pending" / "step-00000004.npz").is_file()


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


def _engines_end_before_the_experts_are_loaded(world: World, first: int, rounds: int = 1) -> None:
    """All engines' pods end after a batch has arrived, ``rounds`` times in a row, for two hours each.

    ``first``: the batch, counted by the calls that load experts.
    """
    until, calls = 0.0, 0
    load = Ranks._load_routed_experts

    def ends(ranks: Ranks, parts: list[list[RoutedExperts]], width: int, fetching: Any) -> list[list[str]]:
        nonlocal until, calls
        calls += 1
        if first <= calls < first + rounds:
            until = world.clock.now() + OUTAGE
        return load(ranks, parts, width, fetching)

    world.routing_replay = True
    world.lost = lambda _reference: first <= calls < first + rounds
    world.away = lambda: "0 of minAvailable=1 engines serve" if world.clock.now() < until else ""
    make = world._group

    def group(_pool: Any) -> Ranks:
        ranks = make(_pool)
        ranks._load_routed_experts = partial(ends, ranks)  # type: ignore[method-assign]
        return ranks

    world._group = group  # type: ignore[method-assign]


@pytest.mark.parametrize("rounds", [1, 5], ids=["once", "repeatedly"])
def test_engines_that_end_before_their_experts_are_loaded_park_the_trainers(
    tmp_path: Path, calm: list[dict[str, Any]], rounds: int
) -> None:
    world = World(tmp_path)
    _engines_end_before_the_experts_are_loaded(world, first=3, rounds=rounds)
    assert world.run() == calm, "the lost groups again, with the same seeds"
    status = world.board.get()
    assert (status.phase, status.attempt, world.starts) == (Phase.SUCCEEDED, 1, 1)
    assert status.restarts.infrastructure == status.restarts.job == 0
    assert status.times_parked == rounds and status.waiting == ""
    assert world.clock.now() >= 1000 + rounds * OUTAGE
    waiting = [seen.waiting for seen in world.seen if seen.waiting]
    assert any("engines serve" in text or "no engine serves" in text for text in waiting)
    assert any("engine.routedExpertsGibibytes is too small" in text for text in waiting) == (rounds > 2)
    assert world.calls.count("save_checkpoint") == 3, "steps 4 and 6, and step 2 while parked"
    assert (tmp_path / "checkpoints" / "step-00000002" / "COMMITTED").is_file()


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("first", [3, 5])
def test_trainers_that_die_while_engines_generate_lost_groups_lose_no_step(
    tmp_path: Path, first: int, lag: int
) -> None:
    """Step 2 is saved while the trainers are parked, step 4 before; with a lag the batch is saved too."""
    changes: dict[str, Any] = {"staleness": {"maxVersionLag": lag}}
    undisturbed = World(tmp_path / "calm", **changes).run()
    world = World(tmp_path / "lost", **changes)
    _engines_end_before_the_experts_are_loaded(world, first=first)
    _die_while_waiting(world)
    assert _without_attempts(world.run()) == _without_attempts(undisturbed)
    status = world.board.get()
    assert (status.phase, status.attempt, world.starts) == (Phase.SUCCEEDED, 2, 2)
    assert status.restored is not None and status.restored.step == first - 1
    assert status.restarts.infrastructure == 1 and "rank 1 on trainer-0" in status.last_failure
