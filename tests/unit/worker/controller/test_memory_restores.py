"""The loop after a restore from the pods' memory: the store has no checkpoint of that step yet."""

from pathlib import Path
from typing import Any

import pytest

from grpo_operator.api.v1alpha1.status import Phase
from grpo_worker.checkpointing.store import complete_steps
from support.loop_world import World

OUTAGE = 7200.0  # seconds


def _lose_a_rank(world: World, outage: float = 0.0, suspend: bool = False) -> None:
    """Lose a rank before step 3, when memory holds step 1 and the store nothing."""
    until = 0.0

    def before(version: int) -> None:
        nonlocal until
        if version == 2 and world.starts == 1:
            world.await_snapshot(1)
            until = world.clock.now() + outage
            world.board.request_suspend(suspend)
            world.groups[0].died.set_result(None)

    world.before_generation = before
    world.away = lambda: "0 of minAvailable=1 engines serve" if world.clock.now() < until else ""


def _committed(world: World, step: int) -> bool:
    return step in complete_steps(world.store / "checkpoints")


def _without_attempts(ledger: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in entry.items() if key != "attempt"} for entry in ledger]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return World(tmp_path_factory.mktemp("calm")).run()


def test_the_status_names_the_newest_checkpoint_of_the_store(
    tmp_path: Path, calm: list[dict[str, Any]]
) -> None:
    world = World(tmp_path, memory=True)
    _lose_a_rank(world)
    assert _without_attempts(world.run()) == _without_attempts(calm)
    restored = world.board.get().restored
    assert restored is not None and (restored.step, restored.source) == (1, "memory")
    copies = world.board.get().memory_copies
    assert copies is not None and copies.step is not None and copies.step >= 1
    for seen in world.seen:
        step = seen.last_checkpoint
        assert step is None or step % 4 == 0 or step == 6, "steps 4 and 6 are saved in the store, no other"


@pytest.mark.parametrize("ahead", [0, 1])
def test_trainers_that_are_parked_at_the_restored_step_save_it(tmp_path: Path, ahead: int) -> None:
    staleness = {"maxVersionLag": ahead}
    undisturbed = World(tmp_path / "calm", staleness=staleness).run()
    world = World(tmp_path / "parked", memory=True, staleness=staleness)
    _lose_a_rank(world, OUTAGE)
    assert _without_attempts(world.run()) == _without_attempts(undisturbed)
    assert world.board.get().times_parked == 1 and world.starts == 2
    assert _committed(world, 1), "if the pods go too, no step is lost"


@pytest.mark.fault(
    row="22",
    point="ranks read changed values in the newest checkpoint",
    witness="two loads, the older one last",
    compared="ledger of an undisturbed run",
    partial="stand-in ranks",
)
def test_a_checkpoint_that_ranks_cannot_read_is_set_aside(tmp_path: Path) -> None:
    calm = World(tmp_path / "calm", steps=10).run()
    world = World(tmp_path / "damaged", steps=10)
    world.damaged = {"step-00000008.attempt-1"}

    def lose_a_rank(version: int) -> None:
        if version == 8 and world.starts == 1:
            world.groups[0].died.set_result(None)

    world.before_generation = lose_a_rank
    assert _without_attempts(world.run()) == _without_attempts(calm)
    assert world.calls.count("load_checkpoint") == 2, "of step 8, and then of step 4"
    restored = world.board.get().restored
    assert restored is not None and (restored.step, restored.source) == (4, "store")


def test_a_job_that_is_suspended_at_the_restored_step_saves_it(
    tmp_path: Path, calm: list[dict[str, Any]]
) -> None:
    world = World(tmp_path, memory=True)
    _lose_a_rank(world, suspend=True)
    suspended: list[tuple[Phase, str, bool]] = []

    def wait_until_resumed() -> None:
        status = world.board.get()
        suspended.append((status.phase, status.message, _committed(world, 1)))
        world.board.request_suspend(False)

    world.board.wait_until_resumed = wait_until_resumed  # type: ignore[method-assign]
    assert _without_attempts(world.run()) == _without_attempts(calm)
    assert suspended == [(Phase.SUSPENDED, "checkpoint of step 1 is complete", True)]
