"""Jobs on real pods go back to an older checkpoint: after a divergence, and when scores have fallen."""

import json
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_devcluster.follow import JobView
from grpo_devcluster.paths import JOB_DATA
from grpo_devcluster.report import load
from grpo_worker.checkpointing.best import Best, kept_best
from grpo_worker.checkpointing.rollbacks import Rollback, rollbacks
from grpo_worker.checkpointing.store import complete_steps
from support import broken_data
from support.broken_data import HELD_OUT, LOWEST
from support.jobs import ENDED, Start, events

pytestmark = pytest.mark.slow  # two jobs, one after the other, that start their ranks twice: five minutes
ROOT = JOB_DATA / "rollback"
PROMPTS, EVERY, STEPS = 8, 4, 12
WORTHLESS = (6, 7)  # steps before the rollback, which goes to the checkpoint before them
CHECKPOINT = {"store": {"path": str(JOB_DATA)}, "everySteps": EVERY, "keep": 2}


@pytest.fixture(scope="module", autouse=True)
def files() -> Iterator[None]:
    """The files of the jobs: the prompts of two steps are worth nothing."""
    shutil.rmtree(ROOT, ignore_errors=True)
    ROOT.mkdir(parents=True)
    broken_data.write(ROOT, range((WORTHLESS[0] - 1) * PROMPTS, WORTHLESS[1] * PROMPTS))
    yield
    shutil.rmtree(ROOT)


def _start(start: Start, name: str, steps: int, validation: dict[str, Any], **spec: Any) -> JobView:
    own = broken_data.data_and_reward(ROOT, PROMPTS) | broken_data.held_out(everySteps=EVERY, **validation)
    return start(name, steps=steps, checkpoint=CHECKPOINT, **own, **spec)


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def _went_back(job: JobView, status: dict[str, Any]) -> Rollback:
    """Return the job's only rollback, since which it has trained on none of the prompts drawn before."""
    assert status["restarts"] == {"job": 0, "infrastructure": 0, "rollback": 1}, status
    assert "TrainingRolledBack" in events(job)
    (back,) = rollbacks(job.store())
    trained: dict[int, set[int]] = defaultdict(set)
    for entry in _lines(job.store() / "ledger.jsonl"):
        trained[entry["step"]].add(int(entry["uid"].split(".")[0]))
        assert entry["attempt"] == (1 if entry["step"] <= back.step else 2), entry
    assert sorted(trained) == list(range(1, len(trained) + 1)) and len(trained) > back.step
    for step, prompts in trained.items():
        steps = step - 1 if step <= back.step else step - 1 - back.step
        first = PROMPTS * steps + (0 if step <= back.step else back.position["cursor"])
        assert prompts == set(range(first, first + PROMPTS)), f"step {step}, back to {back.step}"
    return back


def _scores(store: Path) -> dict[int, float]:
    """Return the score of each version that was validated; the checkpoint of the best saved one is kept."""
    scores = {one["step"]: one["score/mean"] for one in _lines(store / "validation.jsonl")}
    saved = {step: score for step, score in scores.items() if step > 0}
    best = max(saved, key=lambda step: saved[step])  # the first one of those
    assert kept_best(store / "checkpoints") == Best(best, HELD_OUT)
    assert best in complete_steps(store / "checkpoints")
    return scores


def test_a_job_that_diverges_goes_back_once_and_ends_without_the_prompts_that_led_there(start: Start) -> None:
    limit = {"metric": "critic/score/mean", "minimum": LOWEST / 2}
    divergence = {"limits": [limit], "steps": len(WORTHLESS), "onDivergence": "rollback"}
    job = _start(start, "diverges", STEPS, {}, divergence=divergence)
    status = job.wait(ENDED, 300)
    assert (status["phase"], status["step"]) == ("Succeeded", STEPS), status
    back = _went_back(job, status)
    assert (back.step, back.position["cursor"]) == (EVERY, WORTHLESS[1] * PROMPTS)
    assert "critic/score/mean was below 0.25, or no number, in 2 steps in a row" in back.why
    records = load(job.store())
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert [record.get("recovery/rollbacks", 0) for record in records] == [0] * EVERY + [1] * (STEPS - EVERY)
    assert min(record["critic/score/mean"] for record in records) >= LOWEST
    assert list(_scores(job.store())) == list(range(0, STEPS + 1, EVERY))
    job.kubectl("delete", "grpojob", job.name, "--cascade=foreground")


def test_a_job_goes_back_when_its_scores_fall_and_ends_when_they_fall_again(start: Start) -> None:
    # Scores by chance fall below their best soon, and again: 15 versions are validated at most.
    rule = {"onRegression": "rollback", "regressionMargin": 0, "regressionValidations": 1}
    job = _start(start, "falls", 15 * EVERY, rule | {"beforeTraining": False})
    status = job.wait(ENDED, 300)
    assert status["phase"] == "Failed", status
    (failed,) = [one for one in status["conditions"] if one["type"] == "Failed"]
    assert failed["reason"] == "ValidationRegressed"
    used_up = f"validation.rollbacks (1) used up: validation.onRegression: the mean score of {HELD_OUT} was"
    assert failed["message"].startswith(used_up)
    back, scores = _went_back(job, status), _scores(job.store())
    fallen = re.search(r"the last with \S+ at step (\d+)", back.why)
    assert fallen is not None and int(fallen[1]) > back.step
    assert back.position["cursor"] == (int(fallen[1]) + 1) * PROMPTS, "with those of the step beside it"
    *before, last = scores.values()
    assert list(scores) == list(range(EVERY, EVERY * (len(scores) + 1), EVERY)) and last < max(before)
    assert before == sorted(before), "no other score is below one before it"
    best = max(scores, key=lambda step: scores[step])
    assert f"the checkpoint of step {best} is kept" in failed["message"]
    job.kubectl("delete", "grpojob", job.name, "--cascade=foreground")
