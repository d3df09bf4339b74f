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
from grpo_worker.controller.validation.validator import VersionValidator
from grpo_worker.data.tokenizer import load_tokenizer
from grpo_worker.samples.files import sample_steps
from grpo_worker.samples.reader import samples
from grpo_worker.samples.validation_writer import ValidationSampleWriter
from grpo_worker.weightsync.protocol.version import Version
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


def test_a_restart_validates_nothing_twice(tmp_path: Path, calm: Path) -> None:
    world = _world(tmp_path)
    died: list[int] = []

    def die(updates: int) -> None:
        if updates == 5 and not died:
            died.append(updates)
            world.groups[-1].died.set_exception(world.groups[-1].death())
            raise world.groups[-1].death()

    world.before_update = die
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
    first.begin_attempt(0, 1)
    for version in (0, 2, 4, 6):
        first.begin(Version(version))
        first.finish(lambda: None)
    first.flush()
    assert sample_steps(store / "validation_samples") == [0, 2, 4, 6]
    assert {row["score"] for row in samples(store, 4, validation=True)} == {1.0}
    asked = len(world.validated)

    second = opened("new")
    second.begin_attempt(6, 2)
    assert second.results == first.results and best_step(store / "checkpoints") == 4
    second.begin(Version(6))
    second.finish(lambda: None)
    second.flush()
    assert len(world.validated) == asked, "it was validated before"
    assert sample_steps(store / "validation_samples") == [0, 2, 4, 6]


def _status_of(calm: Path, folder: Path) -> Any:
    """Return the status of a run with the results of ``calm``."""
    again = _world(folder / "again")
    again.run()
    return again.board.get().validation
