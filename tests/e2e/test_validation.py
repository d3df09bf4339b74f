"""Validation on real engines: the training has the same bits with it and without it."""

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from grpo_devcluster.report import load
from grpo_worker.samples.reader import samples
from support.jobs import ENDED, Start
from support.runs import assert_same_steps
from support.stored_samples import assert_ids_are_texts

pytestmark = pytest.mark.slow  # two jobs, one after the other: four minutes
STEPS = 8
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


def _records(
    start: Start, name: str, **spec: Any
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
    """Return the metrics of a job's steps, its validations and its status."""
    job = start(name, steps=STEPS, **spec)
    status = job.wait(ENDED, 900)
    assert status["phase"] == "Succeeded", status
    file = job.store() / "validation.jsonl"
    results = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    records = load(job.store())
    for result in results:
        _check_samples(job.store(), result)
    job.kubectl("delete", "grpojob", job.name, "--cascade=foreground")
    return records, results, status


def _check_samples(store: Path, result: dict[str, Any]) -> None:
    """Check that the stored samples of a set are those that were scored, and that ids are their texts."""
    rows = list(samples(store, result["step"], of=result["set"]))
    assert len(rows) == result["prompts"] == len({row["prompt_index"] for row in rows})
    assert fmean(row["score"] for row in rows) == pytest.approx(result["score/mean"])
    for row in rows:
        assert row["version"] == result["step"] and row["engine"]
    assert_ids_are_texts(rows)


def test_validation_changes_no_bit_of_the_training_and_greedy_scores_repeat(start: Start) -> None:
    validation = {"sets": SETS, "everySteps": 3}
    plain, none, _ = _records(start, "plain")
    validated, results, status = _records(start, "validated", validation=validation)
    assert none == []
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
