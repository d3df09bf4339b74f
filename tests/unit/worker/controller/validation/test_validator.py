"""The loop with validation: the training is the same, and each version is validated once."""

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from upath import UPath

from grpo_operator.api.v1alpha1.observability import SamplesSpec
from grpo_operator.api.v1alpha1.status import Phase
from grpo_worker.checkpointing.best import Best, best_step, kept_best
from grpo_worker.common.store_path import JobFolder
from grpo_worker.controller.recovery.run_record import RunRecord
from grpo_worker.controller.validation.validator import VersionValidator
from grpo_worker.data.tokenizer import load_tokenizer
from grpo_worker.samples.files import sample_steps
from grpo_worker.samples.reader import samples
from grpo_worker.samples.validation_writer import ValidationSampleWriter
from grpo_worker.weightsync.protocol.version import Version
from support.gang_deaths import die_once
from support.loop_world import ValidationEngines, World, shared_gpus

SETS = [
    {"name": "gcd", "data": "reasoning-gym:gcd", "prompts": 5},
    {"name": "more", "data": "reasoning-gym:gcd"},
]
TIMES = ("seconds", "wall_time")
TOKENIZER = load_tokenizer("preset:tiny-moe")


def _world(folder: Path, validation: dict[str, Any] | None = None, **changes: Any) -> World:
    return World(folder, validation={"sets": SETS, "everySteps": 2} | (validation or {}), **changes)


def _results(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "validation.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]


def _samples(folder: Path) -> list[dict[str, Any]]:
    """Return the samples of all validations, without what differs between attempts."""
    steps = sample_steps(folder / "validation_samples")
    rows = [row for step in steps for row in samples(folder, step, validation=True)]
    return [{k: v for k, v in row.items() if k not in ("attempt", "time")} for row in rows]


def _losses(folder: Path) -> list[tuple[int, float, float]]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(r["step"], r["actor/loss"], r["critic/score/mean"]) for r in records]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calm")
    world = _world(folder)
    world.run()
    assert world.board.get().phase == Phase.SUCCEEDED
    return folder


def test_validation_changes_nothing_of_the_training(tmp_path: Path, calm: Path) -> None:
    ledger = World(tmp_path).run()
    assert [json.loads(line) for line in (calm / "ledger.jsonl").read_text().splitlines()] == ledger
    assert _losses(calm) == _losses(tmp_path)


def test_versions_are_validated_when_their_turn_comes_and_the_status_has_the_best(tmp_path: Path) -> None:
    world = _world(tmp_path)
    world.run()
    results = _results(tmp_path)
    assert [(r["step"], r["set"], r["prompts"]) for r in results] == [
        (step, name, count) for step in (0, 2, 4, 6) for name, count in (("gcd", 5.0), ("more", 8.0))
    ]
    assert {version for _, version in world.validated} == {0, 2, 4, 6}
    scores = {r["step"]: r["score/mean"] for r in results if r["set"] == "gcd"}
    shown = world.board.get().validation[0]
    assert (shown.step, shown.score) == (6, scores[6])
    assert shown.best_score == max(scores.values()) == scores[shown.best_step]


def test_the_last_step_is_always_validated_and_the_first_weights_only_if_wanted(tmp_path: Path) -> None:
    _world(tmp_path, {"everySteps": 5, "beforeTraining": False}).run()
    assert [r["step"] for r in _results(tmp_path)] == [5, 5, 6, 6]


def test_only_the_numbers_of_pass_at_are_reported(tmp_path: Path) -> None:
    _world(tmp_path, {"samplesPerPrompt": 4, "temperature": 0.5, "passAt": [3, 1]}).run()
    for result in _results(tmp_path):
        assert [name for name in result if name.startswith("pass@")] == [
            "pass@1/mean", "pass@1/ci95", "pass@3/mean", "pass@3/ci95",
        ]  # fmt: skip
        assert result["pass@1/mean"] == pytest.approx(result["score/mean"])


def test_a_restart_validates_nothing_twice(tmp_path: Path, calm: Path) -> None:
    world = _world(tmp_path)
    died = die_once(world, 5)
    world.run()
    assert died and world.starts == 2
    assert _results(tmp_path) == _results(calm)
    assert world.board.get().validation == _status_of(calm, tmp_path)
    assert _samples(tmp_path) == _samples(calm)


def test_the_samples_of_a_validation_are_those_that_it_scored(tmp_path: Path, calm: Path) -> None:
    validated = _world(tmp_path, {"samplesPerPrompt": 2, "temperature": 0.5})
    validated.run()
    for folder, responses in ((calm, 1), (tmp_path, 2)):
        assert sample_steps(folder / "validation_samples") == [0, 2, 4, 6]
        for result in _results(folder):
            rows = list(samples(folder, result["step"], validation=True, of=result["set"]))
            assert fmean(row["score"] for row in rows) == pytest.approx(result["score/mean"])
            assert [row["uid"] for row in rows] == [
                f"{prompt}.{number}"
                for prompt in range(int(result["prompts"]))
                for number in range(responses)
            ]
            assert {(row["version"], row["attempt"]) for row in rows} == {(result["step"], 1)}
    last = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()][-1]
    assert last["samples/missing_validations"] == 0


def test_a_validation_without_engines_is_given_up_and_costs_nothing_else(tmp_path: Path, calm: Path) -> None:
    world = _world(tmp_path)

    def away(version: int) -> None:
        if version == 2:
            raise TimeoutError("no engine serves version 2 after 480 s")

    world.before_validation = away
    world.run()
    status = world.board.get()
    assert status.phase == Phase.SUCCEEDED and status.times_parked == 0 and world.starts == 1
    assert _losses(tmp_path) == _losses(calm)
    assert _results(tmp_path) == [r for r in _results(calm) if r["step"] != 2]
    assert sample_steps(tmp_path / "validation_samples") == [0, 4, 6]
    assert not (tmp_path / "validation_samples" / "draft").exists()


def test_engines_on_the_trainers_gpus_validate_before_they_release_them(tmp_path: Path, calm: Path) -> None:
    world = _world(tmp_path, **shared_gpus())
    held: list[tuple[str, ...]] = []
    world.before_validation = lambda _version: held.append(world.engines_hold)
    world.run()
    assert held and all(held), "engines hold their memory"
    assert _results(tmp_path) == _results(calm)


def test_the_checkpoint_with_the_best_score_outlives_newer_ones(tmp_path: Path) -> None:
    world = World(
        tmp_path,
        steps=12,
        validation={"sets": SETS, "everySteps": 4, "keepBest": "gcd", "beforeTraining": False},
    )
    world.score_of = lambda version: {4: 0.0, 8: 1.0}.get(version, 0.5)
    kept: list[int | None] = []
    world.before_validation = lambda _version: kept.append(best_step(tmp_path / "checkpoints"))
    world.run()
    assert list(dict.fromkeys(kept)) == [None, 4, 8]
    assert kept_best(tmp_path / "checkpoints") == Best(8, "gcd"), "step 12 has a lower score"
    assert world.board.get().validation[0].best_step == 8


FALLING = {0: 0.25, 2: 0.5, 4: 0.75, 6: 0.625, 8: 0.5, 10: 0.625}


def _falling(folder: Path, steps: int = 12, **changes: Any) -> World:
    """Return a job that is to end with the second validation in a row that is 0.1 below the best one."""
    stop = {"onRegression": "stop", "keepBest": "gcd", "regressionMargin": 0.1, "regressionValidations": 2}
    world = World(folder, steps=steps, validation={"sets": SETS, "everySteps": 2} | stop | changes)
    world.score_of = lambda version: FALLING.get(version, 0.5)
    return world


def test_a_job_whose_scores_have_fallen_fails_and_keeps_its_best_checkpoint(tmp_path: Path) -> None:
    world = _falling(tmp_path)
    world.run()
    status = world.board.get()
    assert (status.phase, status.regressed, world.starts) == (Phase.FAILED, True, 1)
    assert status.restarts.job == 0 and _results(tmp_path)[-1]["step"] == 8 and status.step == 8
    assert (status.validation[0].step, status.validation[0].best_step) == (8, 4)
    assert sample_steps(tmp_path / "validation_samples")[-1] == 8
    assert "the mean score of gcd was more than 0.1 below its best one, 0.75 at step 4" in status.message
    assert "in 2 validations in a row, the last with 0.5 at step 8" in status.message
    assert "the checkpoint of step 4 is kept" in status.message
    assert kept_best(tmp_path / "checkpoints") == Best(4, "gcd")
    assert "0.75 at step 4" in (tmp_path / "run.html").read_text()
    again = _falling(tmp_path)
    again.run()
    status = again.board.get()
    assert (status.phase, status.regressed, again.starts) == (Phase.FAILED, True, 0)


@pytest.mark.parametrize(
    "changes",
    [{"onRegression": "continue"}, {"regressionMargin": 0.3}, {"regressionValidations": 6}],
    ids=lambda changes: next(iter(changes)),
)
def test_a_job_goes_on_while_its_scores_are_good_enough(tmp_path: Path, changes: dict[str, Any]) -> None:
    world = _falling(tmp_path, **changes)
    world.run()
    assert world.board.get().phase == Phase.SUCCEEDED


def test_the_last_validation_ends_no_job(tmp_path: Path) -> None:
    world = _falling(tmp_path, steps=8)
    world.run()
    assert world.board.get().phase == Phase.SUCCEEDED


def test_a_replay_decides_as_the_run_did(tmp_path: Path) -> None:
    ends = []
    for folder, dies_at in (("calm", None), ("early", 6), ("late", 8)):
        world = _falling(tmp_path / folder)
        died: list[int] = []

        def die(updates: int, world: World = world, at: int | None = dies_at, died: list[int] = died) -> None:
            if updates == at and not died:
                died.append(updates)
                raise world.groups[-1].death()

        world.before_update = die
        world.run()
        assert world.starts == 1 + len(died) and bool(died) == (dies_at is not None)
        ends.append((world.board.get().message, _results(tmp_path / folder)))
    assert ends[1:] == ends[:1] * 2


def test_a_controller_that_dies_before_it_has_noted_the_end_decides_again(tmp_path: Path) -> None:
    world = _falling(tmp_path, everySteps=4, regressionValidations=1)
    world.score_of = lambda version: 1.0 - version / 10
    noted: list[str] = []

    def died(_record: RunRecord, reason: str, *_ended: bool) -> None:
        noted.append(reason)
        raise SystemExit

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunRecord, "fail", died)
        with pytest.raises(SystemExit):
            world.run()
    assert noted and not RunRecord.load(tmp_path / "run.json").failed
    again = _falling(tmp_path, everySteps=4, regressionValidations=1)
    again.score_of = world.score_of
    again.run()
    assert again.board.get().message == noted[0] and again.board.get().phase == Phase.FAILED


def test_a_job_that_is_resumed_is_judged_by_later_validations(tmp_path: Path) -> None:
    _falling(tmp_path).run()
    resumed = _falling(tmp_path, steps=16)
    resumed.resumes = 1
    updates: list[int] = []

    def die(update: int) -> None:  # the next attempt knows of the resumption too
        updates.append(update)
        if len(updates) == 2:
            raise resumed.groups[-1].death()

    resumed.before_update = die
    resumed.run()
    status, went_on = resumed.board.get(), RunRecord.load(tmp_path / "run.json").resumed_step
    assert resumed.starts == 2 and status.phase == Phase.FAILED
    assert f"at step {went_on + 4};" in status.message, "two validations after the resumption"
    more = _falling(tmp_path, steps=16)
    more.resumes, more.score_of = 2, lambda version: 0.75
    more.run()
    assert (more.board.get().phase, more.board.get().regressed) == (Phase.SUCCEEDED, False)


def test_results_outlive_a_pod_whose_store_is_an_object_store(tmp_path: Path) -> None:
    world = _world(tmp_path / "job", {"keepBest": "gcd"})
    store = UPath(f"memory:/{tmp_path}/job")

    def opened(disk: str) -> VersionValidator:
        (tmp_path / disk).mkdir()
        return VersionValidator(
            world.spec, JobFolder(store, tmp_path / disk), world.validation_sets(),
            ValidationEngines(world, world.engines, 1),
            ValidationSampleWriter(
                JobFolder(store, tmp_path / disk), SamplesSpec(), TOKENIZER.decode_all, lambda: None
            ),
            lambda _: None, lambda *_: None, lambda: None,
        )  # fmt: skip

    world.score_of = lambda version: {4: 1.0}.get(version, 0.5)
    world.spec = world.spec.model_copy(update={"total_steps": 8})
    first = opened("lost")
    first.begin_attempt(0, 1, -1)
    for version in (0, 2, 4, 6):
        first.begin(Version(version), {})
        first.finish(lambda: None)
    first.flush()
    assert sample_steps(store / "validation_samples") == [0, 2, 4, 6]
    assert {row["score"] for row in samples(store, 4, validation=True)} == {1.0}
    asked = len(world.validated)

    second = opened("new")
    second.begin_attempt(6, 2, -1)
    assert second.results == first.results and best_step(store / "checkpoints") == 4
    second.begin(Version(6), {})
    second.finish(lambda: None)
    second.flush()
    assert len(world.validated) == asked, "it was validated before"
    assert sample_steps(store / "validation_samples") == [0, 2, 4, 6]


def _status_of(calm: Path, folder: Path) -> Any:
    """Return the status of a run with the results of ``calm``."""
    again = _world(folder / "again")
    again.run()
    return again.board.get().validation
