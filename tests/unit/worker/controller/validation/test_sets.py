"""Prompts of validation sets."""

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_operator.api.v1alpha1.data import DataSpec, RewardSpec
from grpo_operator.api.v1alpha1.validation import ValidationSpec
from grpo_worker.controller.inputs import open_task
from grpo_worker.controller.model_files import open_model
from grpo_worker.controller.validation.sets import ValidationSet, open_sets
from grpo_worker.data.tasks import open_gym
from grpo_worker.rewards.answers import AnswerWorker
from grpo_worker.rollout.sampling import Sample

GYM = "reasoning-gym:gcd?min_value=1&max_value=9"


class InThisProcess:
    def __init__(self, worker: AnswerWorker, count: int) -> None:
        self.worker, self.count, self.closed = worker, count, False
        WORKERS.append(self)

    def submit(self, method: str, *arguments: Any) -> Any:
        from concurrent.futures import Future

        done: Future[Any] = Future()
        done.set_result(getattr(self.worker, method)(*arguments))
        return done

    def close(self) -> None:
        self.closed = True


WORKERS: list[InThisProcess] = []


def _open(
    sets: list[dict[str, Any]], cache: Path, reward: RewardSpec | None = None
) -> tuple[ValidationSet, ...]:
    WORKERS.clear()
    tokenizer = open_model("preset:tiny-moe").tokenizer
    data = DataSpec.model_validate({"train": GYM, "promptLength": 4096})
    spec = ValidationSpec.model_validate({"sets": sets})
    return open_sets(spec, data, reward, tokenizer, 3, cache, open_task, InThisProcess)


def test_generated_prompts_are_not_those_of_the_training(tmp_path: Path) -> None:
    (one,) = _open([{"name": "gcd", "data": GYM, "prompts": 50}], tmp_path)
    prompts = list(one.prompts())
    assert len(prompts) == 50 and [p.ids for p in prompts] == [p.ids for p in one.prompts()]
    training = open_gym(GYM, seed=3)
    assert [p.ids for p in prompts] != [tuple(training.prompt(i, one.tokenizer)) for i in range(50)]
    assert min(p.index for p in prompts) >= 2**40, "no index of the training"


def test_each_row_of_a_file_is_validated_once_and_judged_by_its_own_answer(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"row {n}", "answer": str(n)}) + "\n" for n in range(7)))
    sets = [{"name": "gym", "data": GYM}, {"name": "rows", "data": str(file)}]
    found = _open(sets, tmp_path / "cache", RewardSpec.model_validate({"builtin": "math", "workers": 4}))
    rows, prompts = found[1], list(found[1].prompts())
    assert sorted(rows.tokenizer.decode_all([p.ids])[0] for p in prompts) == [f"row {n}" for n in range(7)]
    assert [workers.count for workers in WORKERS] == [2, 2], "the job's four, divided"
    for prompt in prompts[:3]:
        number = rows.tokenizer.decode_all([prompt.ids])[0].split()[1]
        given = [rows.tokenizer.encode(text) for text in (number, "77")]
        samples = [Sample(prompt.index, 0, ids, (-0.1,) * len(ids), 0, "engine") for ids in given]
        assert [rows.reward.start([one]).result() for one in samples] == [[1.0], [0.0]]


def test_a_set_that_cannot_be_read_is_named_and_leaves_no_worker(tmp_path: Path) -> None:
    sets = [{"name": "gym", "data": GYM}, {"name": "rows", "data": str(tmp_path / "none.jsonl")}]
    with pytest.raises(ValueError, match=r"spec\.validation\.sets\[1\]\.data=.*none\.jsonl"):
        _open(sets, tmp_path / "cache", RewardSpec.model_validate({"builtin": "math"}))
    assert [workers.closed for workers in WORKERS] == [True]
