"""Validation with real ranks and a real engine: what is stored of it, also after a restart of the gang."""

import json
from collections import Counter
from pathlib import Path
from statistics import fmean

import pytest

from grpo_worker.common.store_path import JobFolder
from grpo_worker.data.tokenizer import load_tokenizer
from grpo_worker.run_page.snapshot import Run, snapshot
from grpo_worker.samples.files import sample_steps
from grpo_worker.samples.reader import samples
from support.at_points import UPDATE, Fault
from support.machines import machines
from support.run_pages import validations_of
from support.whole_job import whole_job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # an engine and a job
STEPS, PROMPTS, RESPONSES, LENGTH = 4, 6, 2, 16
VALIDATION = {
    "sets": [
        {"name": "gcd", "data": "reasoning-gym:gcd", "prompts": PROMPTS},
        {"name": "small", "data": "reasoning-gym:gcd?min_value=1&max_value=9", "prompts": PROMPTS},
    ],
    "everySteps": 2,
    "samplesPerPrompt": RESPONSES,
    "temperature": 0.7,
    "responseLength": LENGTH,
}


def test_the_samples_of_validations_are_stored_once_and_decode_to_their_texts(tmp_path: Path) -> None:
    fault, tokenizer = Fault(UPDATE, 3, 1), load_tokenizer("preset:tiny-moe")
    with machines(tmp_path, {"max_total_tokens": 16384}) as running:
        (tmp_path / "job-of-test").mkdir()
        with whole_job(running, tmp_path / "job-of-test", STEPS, [fault], validation=VALIDATION) as job:
            job.finish(600)
            assert job.witness(fault), "a rank has died in step 3, and all steps were repeated"
    store = tmp_path / "job-of-test" / "job"
    results = [json.loads(line) for line in (store / "validation.jsonl").read_text().splitlines()]
    assert [(one["step"], one["set"]) for one in results] == [
        (step, name) for step in (0, 2, 4) for name in ("gcd", "small")
    ]
    assert sample_steps(store / "validation_samples") == [0, 2, 4]
    for one in results:
        rows = list(samples(store, one["step"], of=one["set"]))
        assert Counter(row["prompt_index"] for row in rows) == dict.fromkeys(range(PROMPTS), RESPONSES)
        assert len({row["uid"] for row in rows}) == len(rows)
        assert fmean(row["score"] for row in rows) == pytest.approx(one["score/mean"])
        # Version 0 was validated before the restart, and not again.
        assert {row["attempt"] for row in rows} == {1 if one["step"] == 0 else 2}
        for row in rows:
            assert (row["version"], row["engine"]) == (one["step"], "engine-0")
            ids = [row["prompt_ids"], row["answer_ids"]]
            assert tokenizer.decode_all(ids) == [row["prompt"], row["answer"]]
            assert 0 < len(ids[1]) == len(row["rollout_log_probs"]) <= LENGTH
            judged = tokenizer.decode(row["answer_ids"]).strip()  # as rewards see it
            assert row["score"] == len(judged) % 2, "the score is that of this answer"
    drawn = snapshot(Run("job", JobFolder(store, store)))["validation"]["sets"]
    assert {
        one["name"]: {curve["name"]: [list(point) for point in curve["points"]] for curve in one["curves"]}
        for one in drawn
    } == validations_of(store)
