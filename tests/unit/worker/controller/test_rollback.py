"""Rollbacks: a job whose scores have fallen goes on from its best checkpoint with other prompts."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from grpo_operator.api.v1alpha1.status import Phase
from grpo_worker.checkpointing import rollbacks
from grpo_worker.checkpointing.rollbacks import Rollback
from grpo_worker.checkpointing.store import complete, complete_steps
from grpo_worker.controller.recovery.run_record import RunRecord
from support.going_back import MOMENTS, losses, skipping
from support.loop_world import World, shared_gpus
from support.parking import without_attempts

STEPS = 12
BEST, FALLEN = 4, 8  # steps: the checkpoint that is kept, and the validation that shows the fall
FALLING = {0: 0.25, 2: 0.5, 4: 0.75, 6: 0.5, 8: 0.5}
SET = {"name": "gcd", "data": "reasoning-gym:gcd", "prompts": 2}
RULE = {"onRegression": "rollback", "keepBest": "gcd", "regressionMargin": 0.1, "regressionValidations": 2}
AHEAD: dict[str, Any] = {"staleness": {"maxVersionLag": 1}}


def _world(folder: Path, rollbacks: int = 1, memory: bool = False, **changes: Any) -> World:
    validation = {"sets": [SET], "everySteps": 2, "rollbacks": rollbacks} | RULE
    world = World(folder, changes.pop("steps", STEPS), memory, validation=validation, **changes)
    _let_scores_fall(world)
    return world


def _let_scores_fall(world: World, always: bool = False) -> None:
    """Let scores fall until the job is rolled back. ``always``: after that too."""

    def score(version: int) -> float:
        back = (world.store / rollbacks.ROLLBACKS).exists() and not always
        return 0.8 if back and version > BEST else FALLING.get(version, 0.5)

    world.score_of = score


def _prompts(ledger: list[dict[str, Any]], step: int) -> list[int]:
    return sorted({int(one["uid"].split(".")[0]) for one in ledger if one["step"] == step})


@pytest.mark.parametrize(
    "changes", [{}, {"memory": True}, AHEAD, shared_gpus()], ids=["on-policy", "memory", "ahead", "colocated"]
)
def test_a_job_goes_on_from_its_best_checkpoint_behind_the_prompts_of_the_abandoned_steps(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    world = _world(tmp_path / "job", **changes)
    ledger, status = world.run(), world.board.get()
    assert (status.phase, status.step, world.starts) == (Phase.SUCCEEDED, STEPS, 2)
    drawn = (FALLEN + 1) * world.spec.data.train_batch_size
    assert min(_prompts(ledger, BEST + 1)) == drawn, "those of the step that was validated beside are skipped"
    plain = {name: value for name, value in changes.items() if name != "memory"}
    expected = skipping(tmp_path / "skipping", BEST, drawn, STEPS, **plain)
    assert without_attempts(ledger) == without_attempts(expected)
    assert losses(tmp_path / "job") == losses(tmp_path / "skipping")


def test_a_rollback_is_visible_and_no_failure(tmp_path: Path) -> None:
    world = _world(tmp_path)
    world.run()
    status, record = world.board.get(), RunRecord.load(tmp_path / "run.json")
    assert (status.restarts.job, status.restarts.infrastructure, status.restarts.rollback) == (0, 0, 1)
    assert (record.recent_failures, record.job_restarts, status.last_failure) == (0, 0, "")
    assert any(f"back to step {BEST}, and on with other prompts" in seen.message for seen in world.seen)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [one.get("recovery/rollbacks", 0) for one in records] == [0] * BEST + [1] * (STEPS - BEST)
    page = (tmp_path / "run.html").read_text()
    assert "rollbacks to an older checkpoint" in page and "restart: rollback" in page
    validated = [json.loads(line) for line in (tmp_path / "validation.jsonl").read_text().splitlines()]
    assert [one["step"] for one in validated] == list(range(0, STEPS + 1, 2)), "no abandoned version"


@pytest.mark.parametrize("memory", [False, True], ids=["store", "memory"])
@pytest.mark.parametrize("update", [BEST, BEST + 1, STEPS - 2])
def test_a_restart_after_a_rollback_repeats_the_same_steps(tmp_path: Path, update: int, memory: bool) -> None:
    calm = without_attempts(_world(tmp_path / "calm", **AHEAD).run())
    world, died = _world(tmp_path / "job", memory=memory, **AHEAD), list[int]()

    def die(updates: int) -> None:
        if len(world.groups) == 2 and updates == update and not died:
            died.append(updates)
            world.groups[-1].died.set_exception(world.groups[-1].death())
            raise world.groups[-1].death()

    world.before_update = die
    assert without_attempts(world.run()) == calm and died and world.starts == 3
    assert world.board.get().restarts.rollback == 1
    assert losses(tmp_path / "job") == losses(tmp_path / "calm")


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_controller_that_dies_during_a_rollback_leaves_it_to_the_next_one_once(
    tmp_path: Path, moment: str
) -> None:
    calm = without_attempts(_world(tmp_path / "calm", **AHEAD).run())
    folder = tmp_path / "job"
    first = _world(folder, **AHEAD)
    with pytest.MonkeyPatch.context() as patch:
        MOMENTS[moment](patch, lambda: (folder / rollbacks.ROLLBACKS).exists())
        with pytest.raises(SystemExit):
            first.run()
    again = _world(folder, **AHEAD)
    assert without_attempts(again.run()) == calm
    assert again.board.get().restarts.rollback == len(rollbacks.rollbacks(folder)) == 1
    assert losses(folder) == losses(tmp_path / "calm")


def test_a_job_ends_when_its_rollbacks_are_used_up_and_has_them_again_after_it_was_resumed(
    tmp_path: Path,
) -> None:
    world = _world(tmp_path, rollbacks=2)
    _let_scores_fall(world, always=True)
    world.run()
    status = world.board.get()
    assert (status.phase, status.regressed, status.restarts.rollback) == (Phase.FAILED, True, 2)
    assert status.message.startswith("validation.rollbacks (2) used up: validation.onRegression: the mean")
    assert f"the checkpoint of step {BEST} is kept" in status.message and status.restarts.job == 0
    batch = world.spec.data.train_batch_size
    cursors = [one.position["cursor"] for one in rollbacks.rollbacks(tmp_path)]
    steps = [FALLEN + 1, FALLEN + 1 - BEST]
    assert cursors == [steps[0] * batch, sum(steps) * batch], "each one skips what was drawn since"
    again = _world(tmp_path, rollbacks=2, steps=24)
    again.resumes = 1
    _let_scores_fall(again, always=True)
    again.run()
    assert (again.board.get().phase, again.board.get().restarts.rollback) == (Phase.FAILED, 4)


def test_a_job_without_a_checkpoint_from_before_the_fall_ends(tmp_path: Path) -> None:
    world = _world(tmp_path)
    world.score_of = lambda version: 1.0 - version / 10
    world.run()
    status = world.board.get()
    assert (status.phase, status.regressed, status.restarts.rollback) == (Phase.FAILED, True, None)
    assert not (tmp_path / rollbacks.ROLLBACKS).exists()


def test_a_checkpoint_that_was_not_saved_is_no_way_back(tmp_path: Path) -> None:
    world, missing = _world(tmp_path), list[Path]()

    def remove(version: int) -> None:
        if version == FALLEN and not missing:
            missing.append(complete(tmp_path / "checkpoints")[BEST])
            shutil.rmtree(missing[0])

    world.before_validation = remove
    world.run()
    assert missing and world.board.get().phase == Phase.FAILED
    assert f"there is no complete checkpoint of step {BEST}" in world.board.get().message


def test_abandoned_checkpoints_and_exports_are_removed_before_training_goes_on(tmp_path: Path) -> None:
    world, seen = _world(tmp_path), []
    export = tmp_path / "export" / "step-00000006"

    def look(version: int) -> None:
        if version == FALLEN and len(world.groups) == 1:
            export.mkdir(parents=True, exist_ok=True)
        if len(world.groups) == 2 and version == BEST:
            seen.append((complete_steps(tmp_path / "checkpoints"), export.exists()))

    world.before_validation = world.before_generation = look
    world.run()
    assert seen and set(map(str, seen)) == {str(([BEST], False))}
    names = [path.name for path in (tmp_path / "checkpoints").iterdir() if path.is_dir()]
    assert "step-00000008.attempt-1" not in names and "step-00000008.attempt-2" in names


def test_a_fork_from_the_checkpoint_skips_the_same_prompts(tmp_path: Path) -> None:
    ledger = _world(tmp_path / "source").run()
    resume = {"store": {"path": "/x"}, "everySteps": 4, "resumeFrom": {"job": "source", "step": BEST}}
    fork = World(tmp_path / "fork", BEST + 2, checkpoint=resume)
    fork.fork_from = tmp_path / "source"
    expected = [one for one in ledger if BEST < one["step"] <= BEST + 2]
    assert without_attempts(fork.run()) == without_attempts(expected)


def test_a_damaged_checkpoint_sends_the_job_further_back_behind_the_same_prompts(tmp_path: Path) -> None:
    world = _world(tmp_path)
    world.damaged = {f"step-{BEST:08d}.attempt-1"}
    ledger = world.run()
    assert world.board.get().phase == Phase.SUCCEEDED
    drawn = (FALLEN + 1) * world.spec.data.train_batch_size
    assert min(_prompts(ledger, 1)) == drawn, "the step-0 weights go on with other prompts"


def test_only_what_was_saved_before_a_rollback_is_abandoned(tmp_path: Path) -> None:
    rollbacks.note(tmp_path, Rollback(4, 2, {"cursor": 9}))
    rollbacks.note(tmp_path, Rollback(8, 5, {"cursor": 30}))
    abandoned = [
        (step, attempt)
        for step in (4, 5, 8, 9)
        for attempt in (1, 2, 3, 5, 6)
        if rollbacks.abandoned(tmp_path, step, attempt)
    ]
    assert abandoned == [(5, 1), (5, 2), (8, 1), (8, 2), (9, 1), (9, 2), (9, 3), (9, 5)]
    noted = rollbacks.rollbacks(tmp_path)
    latest = [rollbacks.latest_after(noted, attempt) for attempt in (2, 5, 6)]
    assert [one and one.position["cursor"] for one in latest] == [30, 30, None]
