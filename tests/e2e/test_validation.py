"""Validation on real engines, all or a share: the training has the same bits with it and without it."""

import json
from collections import defaultdict
from collections.abc import Callable
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest

from grpo_devcluster.report import load
from grpo_worker.samples.reader import samples
from support.jobs import ENDED, Start
from support.runs import assert_same_steps
from support.stored_samples import assert_ids_are_texts

pytestmark = pytest.mark.slow  # four jobs, one after the other: eight minutes
STEPS = 8
ANSWERS, ENGINES = 4, 2  # to a prompt that is sampled, and of the job
SETS = [
    {
        "name": "same",
        "data": "reasoning-gym:gcd?min_numbers=2&max_numbers=2&min_value=1&max_value=9",
        "prompts": 32,
    },
    {
        "name": "larger",
        "data": "reasoning-gym:gcd?min_numbers=2&max_numbers=2&min_value=10&max_value=99",
        "prompts": 16,
    },
]


Records = list[dict[str, Any]]


def _records(
    start: Start, name: str, check: Callable[[Path, dict[str, Any]], Any] | None = None, **spec: Any
) -> tuple[Records, Records, dict[str, Any]]:
    """Return the metrics of a job's steps, its validations and its status.

    ``check``: gets the job's folder and each result of a validation; default: ``_samples``.
    """
    job = start(name, steps=STEPS, **spec)
    status = job.wait(ENDED, 900)
    assert status["phase"] == "Succeeded", status
    file = job.store() / "validation.jsonl"
    results = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    records = load(job.store())
    for result in results:
        (check or _samples)(job.store(), result)
    job.kubectl("delete", "grpojob", job.name, "--cascade=foreground")
    return records, results, status


def _samples(store: Path, result: dict[str, Any], answers: int = 1) -> Records:
    """Return the stored samples of a set: they are those that were scored, and ids are their texts."""
    rows = list(samples(store, result["step"], of=result["set"]))
    assert len(rows) == len({row["uid"] for row in rows}) == answers * result["prompts"]
    assert len({row["prompt_index"] for row in rows}) == result["prompts"]
    assert fmean(row["score"] for row in rows) == pytest.approx(result["score/mean"])
    for row in rows:
        assert row["version"] == result["step"] and row["engine"]
    assert_ids_are_texts(rows)
    return rows


def _check_share(store: Path, result: dict[str, Any]) -> None:
    """Check that the first engine alone has answered, and that pass@k follows from the scores."""
    rows = _samples(store, result, ANSWERS)
    trained = {json.loads(line)["engine"] for line in (store / "ledger.jsonl").read_text().splitlines()}
    assert len(trained) == ENGINES and {row["engine"] for row in rows} == {min(trained)}
    correct: dict[int, list[bool]] = defaultdict(list)
    for row in rows:
        correct[row["prompt_index"]].append(row["score"] >= 1)
    assert {len(of_prompt) for of_prompt in correct.values()} == {ANSWERS}
    chances = {
        "pass@1": [fmean(of_prompt) for of_prompt in correct.values()],
        f"pass@{ANSWERS}": [float(any(of_prompt)) for of_prompt in correct.values()],
    }
    assert {name.split("/")[0] for name in result if name.startswith("pass@")} == chances.keys()
    for name, values in chances.items():
        assert result[f"{name}/mean"] == pytest.approx(fmean(values))
        assert result[f"{name}/ci95"] == pytest.approx(1.96 * stdev(values) / sqrt(len(values)))


@pytest.fixture(scope="module")
def plain(start: Start) -> Records:
    """The steps of a job without validation."""
    records, none, _ = _records(start, "plain")
    assert none == []
    return records


def test_validation_changes_no_bit_of_the_training_and_greedy_scores_repeat(
    start: Start, plain: Records
) -> None:
    validation = {"sets": SETS, "everySteps": 3}
    validated, results, status = _records(start, "validated", validation=validation)
    assert_same_steps(validated, plain)
    assert [(one["step"], one["set"], one["prompts"]) for one in results] == [
        (step, name, count) for step in (0, 3, 6, 8) for name, count in (("same", 32.0), ("larger", 16.0))
    ]
    assert all(0 <= one["score/mean"] <= 1 and one["refused"] == 0 for one in results)
    shown = {one["set"]: one for one in status["validation"]}
    last = {one["set"]: one for one in results}
    assert {name: float(one["score"]) for name, one in shown.items()} == {
        name: float(f"{one['score/mean']:.4g}") for name, one in last.items()
    }
    # Without sampling, the same weights give the same responses, whatever else engines do meanwhile.
    again, repeated, _ = _records(
        start, "sampled", validation=validation | {"beforeTraining": False, "everySteps": 6}
    )
    assert_same_steps(again, plain)
    same = [{k: v for k, v in one.items() if k != "seconds"} for one in repeated]
    assert same == [{k: v for k, v in one.items() if k != "seconds"} for one in results if one["step"] >= 6]


def test_a_share_of_the_engines_samples_for_pass_at_k_and_changes_no_bit_of_the_training(
    start: Start, plain: Records
) -> None:
    validation = {
        "sets": SETS,
        "everySteps": 3,
        "samplesPerPrompt": ANSWERS,
        "temperature": 1.0,
        "passAt": [1, ANSWERS],
        "engineShare": 1 / ENGINES,
    }

    def both_serve(spec: dict[str, Any]) -> None:
        """Let each version wait for both engines: the share is one of those that serve it."""
        spec["rollout"]["template"]["minAvailable"] = ENGINES

    records, results, _ = _records(
        start, "shared", _check_share, change=both_serve, engines=ENGINES, validation=validation
    )
    assert_same_steps(records, plain)
    assert [(one["step"], one["set"]) for one in results] == [
        (step, one["name"]) for step in (0, 3, 6, STEPS) for one in SETS
    ]
    assert any(0 < one["pass@1/mean"] < one[f"pass@{ANSWERS}/mean"] for one in results), "some are correct"
