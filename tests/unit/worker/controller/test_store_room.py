"""A store without room for the next checkpoint: it is put off, and training goes on."""

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_operator.api.v1alpha1.status import Phase
from grpo_worker.checkpointing.store import complete_steps
from support.loop_world import World
from support.parking import OUTAGE, away_during_generation, die_while_waiting, without_attempts

GIB = 2**30
STEPS = 10


def _job(store: Path, **changes: Any) -> World:
    world = World(store, steps=STEPS, **changes)
    world.checkpoint_bytes = GIB
    update = world.board.update

    def at_step(**values: Any) -> None:
        update(**values)
        if "reward_mean" in values:
            world.settle()  # steps take no time here, and a real store answers in one

    world.board.update = at_step  # type: ignore[method-assign]
    return world


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return World(tmp_path_factory.mktemp("calm"), steps=STEPS).run()


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], int]], None]:
    """Return a function that sets what the store says of its free bytes."""

    def install(bytes_free: Callable[[], int], total: int = 100 * GIB) -> None:
        usage = shutil.disk_usage("/")

        def measure(_path: Path) -> Any:
            assert threading.current_thread() is not threading.main_thread(), "a step asks the store"
            return usage._replace(total=total, free=bytes_free())

        monkeypatch.setattr("grpo_worker.checkpointing.space.shutil.disk_usage", measure)

    return install


def _put_off(store: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (store / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["recovery/checkpoint_put_off_steps"] for line in lines}


def test_a_first_checkpoint_without_room_is_put_off_and_training_goes_on(
    tmp_path: Path, calm: list[dict[str, Any]], free: Any
) -> None:
    world = _job(tmp_path)
    free(lambda: GIB if world.updates < 7 else 2 * GIB)
    assert world.run() == calm, "the same samples of the same attempt, each once"
    status = world.board.get()
    assert (status.phase, status.attempt, status.times_parked) == (Phase.SUCCEEDED, 1, 0)
    assert complete_steps(tmp_path / "checkpoints") == [8, 10] and world.calls.count("save_checkpoint") == 2
    put_off = _put_off(tmp_path)
    assert [put_off[step] for step in range(3, 9)] == [0, 1, 2, 3, 4, 0]
    problems = [seen for seen in world.seen if seen.checkpoint_problem]
    label = world.spec.checkpoint.store.label
    assert problems[0].checkpoint_problem == (
        f"the checkpoint of step 4 is put off: {label} has 1 GiB free of the 1 GiB that a checkpoint takes: "
        f"free 0.02 GiB in {tmp_path / 'checkpoints'} or enlarge it"
    )
    assert {seen.phase for seen in problems} == {Phase.TRAINING}
    assert any(seen.message == seen.checkpoint_problem for seen in problems), "status.message says so"
    assert status.checkpoint_problem == ""


def test_a_store_that_does_not_know_its_size_delays_nothing(
    tmp_path: Path, calm: list[dict[str, Any]], free: Any
) -> None:
    free(lambda: 0, total=0)
    world = _job(tmp_path)
    assert world.run() == calm and complete_steps(tmp_path / "checkpoints") == [4, 8, 10]


def test_a_store_that_cannot_be_asked_delays_nothing(
    tmp_path: Path, calm: list[dict[str, Any]], free: Any
) -> None:
    def away() -> int:
        raise OSError(116, "Stale file handle")

    free(away)
    world = _job(tmp_path)
    assert world.run() == calm and complete_steps(tmp_path / "checkpoints") == [4, 8, 10]


def _full_at_the_end(world: World, free: Any) -> None:
    until: list[float] = []

    def bytes_free() -> int:
        if world.updates == STEPS and not until:
            until.append(world.clock.now() + OUTAGE)
        return 0 if until and world.clock.now() < until[0] else GIB

    world.checkpoint_bytes = GIB // 2
    free(bytes_free)


def test_the_last_checkpoint_waits_for_room_with_live_trainers(
    tmp_path: Path, calm: list[dict[str, Any]], free: Any
) -> None:
    world = _job(tmp_path, restartPolicy={"maxSameFailures": 1})
    _full_at_the_end(world, free)
    assert world.run() == calm
    status = world.board.get()
    assert (status.phase, status.attempt, world.starts, status.times_parked) == (Phase.SUCCEEDED, 1, 1, 1)
    assert world.clock.now() >= 1000 + OUTAGE and complete_steps(tmp_path / "checkpoints") == [4, 8, 10]
    waiting = [seen for seen in world.seen if seen.waiting]
    assert waiting and all("has 0 GiB free" in seen.waiting for seen in waiting)


def test_trainers_that_die_while_the_last_checkpoint_waits_recover(
    tmp_path: Path, calm: list[dict[str, Any]], free: Any
) -> None:
    world = _job(tmp_path)
    _full_at_the_end(world, free)
    die_while_waiting(world)
    assert without_attempts(world.run()) == without_attempts(calm)
    status = world.board.get()
    assert (status.phase, status.attempt, status.restarts.infrastructure) == (Phase.SUCCEEDED, 2, 1)


def test_trainers_that_are_parked_without_room_save_when_there_is_some(
    tmp_path: Path, calm: list[dict[str, Any]], free: Any
) -> None:
    world = _job(tmp_path)
    away_during_generation(world, version=2)
    free(lambda: 2 * GIB if world.clock.now() > 1000 + OUTAGE else 0)
    assert world.run() == calm
    assert world.board.get().times_parked == 1
    assert complete_steps(tmp_path / "checkpoints")[-1] == 10
    saved = [seen.last_checkpoint for seen in world.seen if seen.last_checkpoint]
    assert saved[0] == 4, "room came back in step 3, whose end looks for the next one"
