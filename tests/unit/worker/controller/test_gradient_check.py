"""Updates that spec.trainer.gradientCheck checks."""

import json
from pathlib import Path

from support.loop_world import World
from support.objects import job

STEPS = 6


def _world(folder: Path, **trainer: object) -> World:
    spec = job()["spec"]["trainer"]
    mini_batch = job()["spec"]["data"]["trainBatchSize"] // 2  # two updates a step
    return World(folder, STEPS, trainer=spec | {"miniBatchSize": mini_batch} | trainer)


def test_the_first_update_of_some_steps_is_checked(tmp_path: Path) -> None:
    world = _world(tmp_path, gradientCheck={"everySteps": 3})
    world.run()
    assert world.checks == [False, False] * 2 + [True, False] + [False, False] * 2 + [True, False]
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    checked = [record["step"] for record in records if record.get("actor/gradients_checked")]
    assert checked == [3, 6]


def test_no_update_is_checked_by_default(tmp_path: Path) -> None:
    world = _world(tmp_path)
    world.run()
    assert world.checks == [False] * 2 * STEPS
