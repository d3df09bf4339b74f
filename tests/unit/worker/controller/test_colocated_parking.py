"""The loop on shared GPUs while engines are away: checkpoints come from host memory."""

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_operator.api.v1alpha1.status import Phase
from support.loop_world import World, shared_gpus

OUTAGE = 7200.0  # seconds


def _world(store: Path) -> World:
    return World(store, **shared_gpus())


def _steps(ledger: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in entry.items() if key != "attempt"} for entry in ledger]


def _away_once(world: World, version: int) -> None:
    """Engines leave when they generate with ``version``, and hold the GPUs as far as anybody knows."""
    begin: list[float] = []

    def before(seen: int) -> None:
        if seen == version and not begin:
            assert world.engines_hold, "engines generate, so they hold the GPUs"
            begin.append(world.clock.now())

    world.before_generation = before
    world.away = lambda: "no engine found" if begin and world.clock.now() < begin[0] + OUTAGE else ""


def _die_at_the_wait(world: World, number: int) -> None:
    sleep, waits = world.clock.sleep, 0

    def sleep_and_die(seconds: float) -> None:
        nonlocal waits
        sleep(seconds)
        waits += 1
        if waits == number:
            world.groups[0].died.set_result(None)

    world.clock.sleep = sleep_and_die  # type: ignore[method-assign]


@pytest.mark.parametrize("dies", [False, True], ids=["alive", "dead"])
def test_parked_trainers_save_without_the_gpus(tmp_path: Path, dies: bool) -> None:
    undisturbed = _world(tmp_path / "calm")
    calm = undisturbed.run()
    assert undisturbed.saved_from_host == [False, False]
    world = _world(tmp_path / "away")
    _away_once(world, version=3)
    if dies:
        _die_at_the_wait(world, 50)
    assert _steps(world.run()) == _steps(calm)
    status = world.board.get()
    assert (status.phase, status.attempt, world.starts) == (Phase.SUCCEEDED, 1 + dies, 1 + dies)
    assert world.clock.now() >= 1000 + OUTAGE and status.times_parked >= 1
    assert world.saved_from_host == [True, False, False], "step 3 while engines were away, then 4 and 6"
    assert (tmp_path / "away" / "checkpoints" / "step-00000003.attempt-1" / "COMMITTED").is_file() or not dies
    assert not dies or (status.restored is not None and status.restored.step == 3)


def test_engines_that_keep_the_gpus_park_the_trainers_after_a_checkpoint(tmp_path: Path) -> None:
    calm = _world(tmp_path / "calm").run()
    world = _world(tmp_path / "kept")
    begin: list[float] = []

    def keeps() -> str:
        if not begin and world.updates == 2:  # the samples of step 3 are there
            begin.append(world.clock.now())
        return "engine-0" if begin and world.clock.now() < begin[0] + OUTAGE else ""

    world.keeps_gpus = keeps
    assert world.run() == calm
    status = world.board.get()
    assert (status.phase, status.attempt, status.times_parked) == (Phase.SUCCEEDED, 1, 1)
    assert world.saved_from_host == [True, False, False]
    records = [json.loads(line)["step"] for line in (tmp_path / "kept" / "metrics.jsonl").open()]
    assert records == [1, 2, 3, 4, 5, 6]
