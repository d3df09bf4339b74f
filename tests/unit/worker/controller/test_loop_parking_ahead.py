"""Trainers that are parked while samples of the next step are generated ahead: no step is lost."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from grpo_operator.api.v1alpha1.status import Phase
from grpo_worker.controller.recovery.checkpoints import RunCheckpoints
from grpo_worker.rollout.engine_pool import Target
from support.loop_world import World
from support.parking import OUTAGE, away_during_generation, die_while_waiting, without_attempts


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
        die_while_waiting(world, lambda: bool(begin))
    assert without_attempts(world.run()) == without_attempts(undisturbed)
    status = world.board.get()
    assert status.phase == Phase.SUCCEEDED and status.attempt == world.starts == 1 + dies
    assert (tmp_path / "parked" / "checkpoints" / "step-00000003.attempt-1" / "COMMITTED").is_file()
    assert (tmp_path / "parked" / "pending" / "step-00000003.attempt-1.npz").is_file()
    assert not dies or (status.restored is not None and status.restored.step == 3)
    assert {entry["version"] for entry in undisturbed if entry["step"] == 4} == {2}, "one step ahead"


@pytest.mark.parametrize("dies", [False, True], ids=["alive", "dead"])
@pytest.mark.parametrize("partial", [False, True], ids=["whole", "partial"])
def test_no_step_is_lost_while_samples_are_generated_ahead(tmp_path: Path, partial: bool, dies: bool) -> None:
    """Engines go away in the middle of the samples of step 4, while step 3 is trained."""
    ahead: dict[str, Any] = {"staleness": {"maxVersionLag": 1, "partialRollouts": partial}}
    undisturbed = World(tmp_path / "calm", **ahead).run()
    world = World(tmp_path / "parked", **ahead)
    away_during_generation(world, version=2)
    if dies:
        die_while_waiting(world, lambda: bool(world.away() and world.board.get().times_parked))
    ledger = world.run()
    status = world.board.get()
    assert status.phase == Phase.SUCCEEDED and status.attempt == world.starts == 1 + dies
    assert status.times_parked == 1 + dies
    assert (tmp_path / "parked" / "checkpoints" / "step-00000003.attempt-1" / "COMMITTED").is_file()
    records = [json.loads(line) for line in (tmp_path / "parked" / "metrics.jsonl").open()]
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    if not dies:
        assert ledger == undisturbed
        assert (tmp_path / "parked" / "pending" / "step-00000003.attempt-1.npz").is_file(), (
            "added when it was there"
        )
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
    away_during_generation(world, version=2)
    leave, died = world.before_generation, threading.Event()

    def leave_or_die(version: int) -> None:
        leave(version)
        if version == 3 and not died.is_set():  # step 4 trains, whose checkpoint is not complete
            died.set()
            world.groups[0].died.set_result(None)

    world.before_generation = leave_or_die
    assert without_attempts(world.run()) == without_attempts(undisturbed)
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
        die_while_waiting(world, lambda: bool(world.away() and world.board.get().times_parked))
    ledger = world.run()
    status = world.board.get()
    assert status.phase == Phase.SUCCEEDED and status.attempt == world.starts == 1 + dies
    assert (tmp_path / "away" / "checkpoints" / "step-00000004.attempt-1" / "COMMITTED").is_file()
    if dies:
        assert status.restored is not None and status.restored.step == 4, "saved before those samples"
        assert [entry["uid"] for entry in ledger] == [entry["uid"] for entry in undisturbed]
        return
    assert ledger == undisturbed
    assert status.times_parked == 1 and status.restarts.infrastructure == 0
    assert world.calls.count("save_checkpoint") == 2, "step 4 is saved once"
    assert (tmp_path / "away" / "pending" / "step-00000004.attempt-1.npz").is_file()
