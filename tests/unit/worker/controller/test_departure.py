"""Pods that are about to end: finished steps are saved first, once, and the next attempt loses none."""

import json
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_operator.api.v1alpha1.status import Phase
from grpo_worker.checkpointing.store import complete_steps
from grpo_worker.controller.recovery.departure import Departure, LeavingError
from grpo_worker.controller.recovery.run_record import RunRecord
from grpo_worker.controller.training.worker_group import GangError
from grpo_worker.roles.host import RankHost
from support.loop_world import World

STEPS = 6  # a checkpoint is due after step 4
Ledger = list[dict[str, Any]]


def _undisturbed(tmp_path: Path, **changes: Any) -> Ledger:
    return World(tmp_path / "undisturbed", STEPS, **changes).run()


def _content(ledger: Ledger) -> list[Any]:
    """Return what was trained, whatever attempt it was."""
    return [{name: value for name, value in line.items() if name != "attempt"} for line in ledger]


def _saved(world: World) -> list[int]:
    return sorted(complete_steps(world.store / "checkpoints"))


def _once(act: Callable[[], None], at: int) -> Callable[[int], None]:
    """Return a function that acts when it is first called with ``at``."""
    done = threading.Event()

    def call(number: int) -> None:
        if number == at and not done.is_set():
            done.set()
            act()

    return call


def _leave_own(world: World) -> None:
    world.departure._request()


def _leave_trainer(world: World) -> None:
    world.groups[-1].leaving.set_result(RankHost("10.0.0.2", 1, "trainer-1"))


@pytest.mark.parametrize(
    ("moment", "saved"), [("generation", 2), ("update", 3)], ids=["while generating", "in the update"]
)
def test_the_controller_saves_what_is_finished_and_the_next_one_continues(
    moment: str, saved: int, tmp_path: Path
) -> None:
    first = World(tmp_path / "job", STEPS)
    leave = _once(lambda: _leave_own(first), at=2)
    if moment == "generation":
        first.before_generation = leave
    else:
        first.before_update = leave
    first.run()
    assert _saved(first) == [saved], "no checkpoint was due before step 4"
    status = first.board.get()
    assert status.phase == Phase.RECOVERING and status.step == saved
    assert status.message == (
        f"the controller's pod is being deleted; the checkpoint of step {saved} is complete"
    )
    assert first.groups[-1].killed
    record = RunRecord.load(first.store / "run.json")
    assert not record.running and record.restarts == {"job": 0, "infrastructure": 0}, "no death is counted"
    second = World(tmp_path / "job", STEPS)
    ledger = second.run()
    assert second.board.get().restored.step == saved  # type: ignore[union-attr]
    assert _content(ledger) == _content(_undisturbed(tmp_path))
    steps = [json.loads(line)["step"] for line in (second.store / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, STEPS + 1))


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_training_pod_that_ends_costs_no_finished_step(ahead: int, tmp_path: Path) -> None:
    world = World(tmp_path / "job", STEPS, staleness={"maxVersionLag": ahead})
    world.before_update = _once(lambda: _leave_trainer(world), at=2)
    ledger = world.run()
    assert world.starts == 2 and 3 in _saved(world)
    assert world.board.get().phase == Phase.SUCCEEDED
    assert [status.restored.step for status in world.seen if status.restored][-1] == 3
    failures = {status.last_failure for status in world.seen if status.last_failure}
    assert failures == {"pod trainer-1 (10.0.0.2) is being deleted; the checkpoint of step 3 is complete"}
    assert world.board.get().restarts.infrastructure == 1
    assert [line["step"] for line in ledger].count(3) == [line["step"] for line in ledger].count(2)
    if not ahead:
        assert _content(ledger) == _content(_undisturbed(tmp_path))


def test_a_checkpoint_that_exists_is_not_written_again(tmp_path: Path) -> None:
    world = World(tmp_path / "job", STEPS)
    world.before_generation = _once(lambda: _leave_own(world), at=4)
    world.run()
    assert _saved(world) == [4] and len(world.saved_from_host) == 1
    assert "the checkpoint of step 4 is complete" in world.board.get().message


def test_before_the_first_step_there_is_nothing_to_save(tmp_path: Path) -> None:
    world = World(tmp_path / "job", STEPS)
    world.before_generation = _once(lambda: _leave_own(world), at=0)
    world.run()
    assert _saved(world) == [] and world.groups[-1].killed


def test_a_save_that_fails_is_told_and_the_controller_ends(tmp_path: Path) -> None:
    world = World(tmp_path / "job", STEPS)

    def leave() -> None:
        _leave_own(world)
        world.checkpoint_error = GangError("the processes of rank 1 have ended", [1])  # its grace was shorter

    world.before_generation = _once(leave, at=2)
    world.run()
    assert _saved(world) == [] and world.starts == 1
    assert "step 2 was not saved: the processes of rank 1 have ended" in world.board.get().message


def test_a_controller_that_ends_starts_no_other_gang(tmp_path: Path) -> None:
    world = World(tmp_path / "job", STEPS)

    def die() -> None:
        world.groups[-1].died.set_result(None)
        _leave_own(world)

    world.before_update = _once(die, at=2)
    world.run()
    assert world.starts == 1 and not RunRecord.load(world.store / "run.json").running


@pytest.fixture
def handler() -> Iterator[Departure]:
    before = signal.getsignal(signal.SIGTERM)
    departure = Departure()
    departure.listen()
    yield departure
    signal.signal(signal.SIGTERM, before)


def test_sigterm_asks_the_loop_while_steps_are_at_stake_and_ends_the_process_else(handler: Departure) -> None:
    with handler.holding():
        signal.raise_signal(signal.SIGTERM)
        handler.notices[0].result(10)
        with pytest.raises(LeavingError, match="the controller's pod is being deleted"):
            handler.check()
        with handler.saving():
            handler.check()
        with pytest.raises(SystemExit), handler.idle():
            pytest.fail("a suspended job has nothing to save")
    with pytest.raises(SystemExit):
        signal.raise_signal(signal.SIGTERM)
