"""The loop of a job that starts from another job's checkpoint, and of one that goes on after its end."""

import json
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest

from grpo_operator.api.v1alpha1.status import Phase
from grpo_worker.algorithms.kl import KlController
from grpo_worker.checkpointing.store import complete, complete_steps, directory
from grpo_worker.controller.recovery.run_record import RunRecord
from support.loop_world import World
from support.objects import job, spec_of


def _ledger(world: World) -> list[dict[str, Any]]:
    return [{key: value for key, value in entry.items() if key != "attempt"} for entry in world.run()]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A job of 10 steps with checkpoints of 8 and 10, and its ledger."""
    world = World(tmp_path_factory.mktemp("source"), steps=10)

    def wait_for_records(_version: int) -> None:
        """Wait, because on a busy machine they take longer than the steps until the next checkpoint."""
        wait([world.loop.checkpoints._records])

    world.before_generation = wait_for_records
    return world.store, _ledger(world)


def _fork(store: Path, source: Path, steps: int = 10, **resume_from: Any) -> World:
    world = World(store, steps=steps)
    checkpoint = {"store": {"path": "/x"}, "everySteps": 4, "resumeFrom": {"job": "source"} | resume_from}
    world.spec = spec_of(job(totalSteps=steps, checkpoint=checkpoint))
    world.fork_from = source
    return world


def test_a_fork_of_the_same_job_takes_the_same_steps(
    tmp_path: Path, source: tuple[Path, list[dict[str, Any]]]
) -> None:
    folder, expected = source
    before = sorted(folder.rglob("*"))
    world = _fork(tmp_path, folder, step=8)
    found = _ledger(world)
    assert found == [entry for entry in expected if entry["step"] > 8] and len(found) > 0
    assert world.updates == 10 and sorted(folder.rglob("*")) == before
    status = world.board.get()
    assert (status.phase, status.restarts.job, status.attempt) == (Phase.SUCCEEDED, 0, 1)
    assert status.resumed_from == str(directory(folder / "checkpoints", 8, 1))


def test_a_fork_with_the_weights_begins_at_step_0(
    tmp_path: Path, source: tuple[Path, list[dict[str, Any]]]
) -> None:
    folder, expected = source
    world = _fork(tmp_path, folder, steps=3, step=8, load="weights")
    found = _ledger(world)
    assert {entry["step"] for entry in found} == {1, 2, 3} and world.updates == 8 + 3
    assert world.calls.count("load_checkpoint") == 1
    assert found == [entry for entry in expected if entry["step"] <= 3], "prompts from the beginning"


def test_a_fork_that_loses_its_gang_goes_on_without_its_source(
    tmp_path: Path, source: tuple[Path, list[dict[str, Any]]]
) -> None:
    folder, expected = source
    world = _fork(tmp_path, folder, step=8)

    def lose_a_rank(version: int) -> None:
        if version == 9 and world.starts == 1:
            world.fork_from = tmp_path / "deleted"
            world.groups[0].died.set_result(None)

    world.before_generation = lose_a_rank
    assert _ledger(world) == [entry for entry in expected if entry["step"] > 8]
    assert world.starts == 2 and complete_steps(tmp_path / "checkpoints") == [8, 10]
    assert complete(tmp_path / "checkpoints")[8].name == "step-00000008.attempt-1"


def test_a_job_with_more_steps_goes_on_as_if_it_had_never_ended(
    tmp_path: Path, source: tuple[Path, list[dict[str, Any]]]
) -> None:
    _, expected = source
    first = World(tmp_path, steps=6)
    _ledger(first)
    assert first.board.get().phase is Phase.SUCCEEDED
    more = World(tmp_path, steps=10)
    more.resumes = 1
    assert _ledger(more) == expected
    status = more.board.get()
    assert (status.attempt, status.restarts.job, status.restarts.infrastructure) == (2, 0, 0)
    assert status.restored is not None and status.restored.step == 6


def test_a_failed_job_goes_on_with_true_counts_and_new_limits(tmp_path: Path) -> None:
    limits = {"maxRestarts": 1, "maxSameFailures": 5, "backoffSeconds": 0}

    def fail_at(world: World, version: int, times: int) -> None:
        failed: list[int] = []

        def fail(now: int) -> None:
            if now == version and len(failed) < times:
                failed.append(now)
                raise KeyError("the reward is wrong")

        world.before_generation = fail

    first = World(tmp_path, restartPolicy=limits)
    fail_at(first, 4, times=9)
    _ledger(first)
    ended = first.board.get()
    assert ended.phase is Phase.FAILED and "maxRestarts (1) used up" in ended.message
    assert ended.restarts.job == 2

    again = World(tmp_path, restartPolicy=limits)
    _ledger(again)
    assert again.board.get().phase is Phase.FAILED and again.starts == 0, "nobody has asked for it"

    resumed = World(tmp_path, restartPolicy=limits)
    resumed.resumes = 1
    fail_at(resumed, 5, times=1)
    _ledger(resumed)
    status = resumed.board.get()
    assert status.phase is Phase.SUCCEEDED and status.restarts.job == 3
    assert resumed.seen[0].restarts.infrastructure == 0, "the end of its controller is no death"
    record = RunRecord.load(tmp_path / "run.json")
    assert (record.resumes, record.restarts_before, record.failed) == (1, 2, "")
    record.resume(1)
    assert not record.resumed, "a controller that restarts takes nothing back"


def test_the_time_between_the_end_and_the_resumption_costs_nothing(tmp_path: Path) -> None:
    _ledger(World(tmp_path))
    file = tmp_path / "gpu_time.json"
    state = json.loads(file.read_text())
    file.write_text(json.dumps(state | {"at": state["at"] - 10**6}))
    more = World(tmp_path, steps=8)
    more.resumes = 1
    _ledger(more)
    assert sum(more.board.get().lost_gpu_seconds.values()) < 10**4


def test_the_coefficient_of_another_job_is_not_taken_over() -> None:
    adaptive = {"type": "adaptive", "klCoef": 0.2, "targetKl": 0.1, "horizon": 100}

    def controller(**klctrl: Any) -> KlController:
        spec = spec_of(job(algorithm={"samplesPerPrompt": 16, "klCtrl": klctrl}))
        assert spec.algorithm.kl_ctrl is not None
        return KlController(spec.algorithm.kl_ctrl)

    saved = controller(**adaptive)
    saved.update(1.0, 10)
    for own, expected in (
        (adaptive, saved.value),
        (adaptive | {"klCoef": 0.3}, 0.3),
        ({"type": "fixed", "klCoef": 0.2}, 0.2),
    ):
        found = controller(**own)
        found.load_state_dict(saved.state_dict())
        assert found.value == expected
