"""Named parts of rewards: from a user's function, through its process and groups, to a step's batch."""

import logging
from pathlib import Path
from typing import Any

import pytest
from upath import UPath

from grpo_operator.api.v1alpha1.data import RewardSpec
from grpo_rehearsal.standins.answer_workers import InlineWorkers
from grpo_worker.common.reward_parts import Reward, part_columns, parts_of, with_parts
from grpo_worker.controller.generation.step_sampler import StepSampler
from grpo_worker.data.prompts import Prompt, PromptSource
from grpo_worker.data.tasks import Record, open_gym
from grpo_worker.data.tokenizer import load_tokenizer
from grpo_worker.metrics.timing import StepTimer
from grpo_worker.rewards.child import Judge
from grpo_worker.rewards.manager import RewardManager
from grpo_worker.rewards.returned import MOST_PARTS
from grpo_worker.rewards.verifiers import FunctionVerifier, Item
from grpo_worker.rollout.batch_file import RolloutBatch
from grpo_worker.rollout.sampling import Sample
from grpo_worker.weightsync.protocol.version import Version
from support.objects import job, spec_of
from support.rollout_fakes import Even, N

FUNCTIONS = """
def judge(solution_str, **_):
    length = len(solution_str)
    if solution_str == "many":
        return {"score": 1.0} | {f"part {number:02}": number for number in range(40)}
    if solution_str == "names":
        return {"score": 1.0, "a/b": 1, "x" * 65: 2, "": 3, "gr\u00f6\u00dfe": 4, "..": 5, "good_one-1.5": 6}
    if solution_str == "others":
        return {"score": 0.5, "why": "because", "accuracy": True, "distance": float("inf"), 7: 8}
    if solution_str == "raise":
        raise KeyError("x")
    return {"score": length % 2, "length": length, "odd": length % 2} if length else 0.25
"""


@pytest.fixture
def function(tmp_path: Path) -> str:
    file = tmp_path / "reward.py"
    file.write_text(FUNCTIONS)
    return f"{file}:judge"


@pytest.fixture
def judge(function: str) -> FunctionVerifier:
    return FunctionVerifier(RewardSpec(function=function, workers=2, timeout_seconds=5))


def _parts(judge: FunctionVerifier, *answers: str) -> list[dict[str, float]]:
    record = Record("mine", "yes", {})
    return [dict(parts_of(score)) for score in judge.score([Item(0, text, record) for text in answers])]


def test_numbers_beside_the_score_are_its_parts(judge: FunctionVerifier) -> None:
    items = [Item(0, answer, Record("mine", "yes", {})) for answer in ("abc", "", "others", "raise")]
    scores = judge.score(items)
    assert scores == [1.0, 0.25, 0.5, 0.0] and judge.failures == 1
    assert [parts_of(score) for score in scores] == [
        {"length": 3.0, "odd": 1.0}, {}, {"accuracy": 1.0, "7": 8.0}, {},
    ]  # fmt: skip


def test_parts_are_bounded_and_a_job_says_once_what_is_left_out(
    judge: FunctionVerifier, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        many, names = _parts(judge, "many", "names")
        _parts(judge, "many", "many")
    assert many == {f"part {number:02}": float(number) for number in range(MOST_PARTS)}
    assert names == {"good_one-1.5": 6.0}
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "reward.py:2: returned 24 numbers beside 'score' that are left out, such as 'part 16'" in warning
    assert warning.startswith("spec.reward.function=") and "return at most 16, with names of" in warning


def test_the_check_before_the_first_step_names_what_is_left_out(
    judge: FunctionVerifier, caplog: pytest.LogCaptureFixture
) -> None:
    judge.check(Item(0, "names", Record("mine", "yes", {})))
    assert "returned 5 numbers beside 'score' that are left out, such as ''" in caplog.text


def test_lists_have_no_parts() -> None:
    def rewards(completions: list[str], **_: Any) -> list[float]:
        return [1.0]

    request = Item(0, "a", Record("mine", "yes", {})).request()
    assert Judge(rewards)(request) == {"score": 1.0, "parts": {}, "warning": ""}


class _Letters:
    """A tokenizer with a token for each letter."""

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


class _Engines(Even):
    """Engines whose answer K to a prompt has 1 + K letters."""

    def generate(self, prompts: list[Prompt], version: int, cancelled: Any = None) -> list[Sample]:
        return [
            Sample(prompt.index, k, [97] * (1 + k), [-0.1] * (1 + k), version, "e")
            for prompt in prompts
            for k in range(N)
        ]


def test_parts_reach_the_batch_of_a_step_in_the_order_of_its_samples(judge: FunctionVerifier) -> None:
    task, letters = open_gym("reasoning-gym:gcd", seed=3), _Letters()
    source = PromptSource(task, load_tokenizer("preset:tiny-moe"), 4096)
    reward = RewardManager(task, letters, judge, InlineWorkers(letters))  # type: ignore[arg-type]
    engines: Any = _Engines()
    batch = StepSampler(spec_of(job()), source, engines, reward).sample(Version(4), StepTimer())
    assert len(batch.samples) > N
    for sample, score in zip(batch.samples, batch.scores, strict=True):
        length = float(len(sample.ids))
        assert score == length % 2 and parts_of(score) == {"length": length, "odd": length % 2}


def _batch(*scores: float) -> RolloutBatch:
    prompt = Prompt(0, (5,))
    samples = [Sample(0, number, [7], [-0.5], 1, "e") for number in range(len(scores))]
    return RolloutBatch([prompt], samples, list(scores), [prompt])


@pytest.mark.parametrize("place", ["file", "bucket"])
def test_a_saved_batch_keeps_its_parts(tmp_path: Path, place: str) -> None:
    path = tmp_path / "a.npz" if place == "file" else UPath("memory://parts/a.npz")
    scores = [Reward(1.0, {"b": 0.1, "a": -2.0}), 0.5, Reward(0.0, {"a": 3.0})]
    _batch(*scores).write(path)
    read = RolloutBatch.read(path)
    assert read == _batch(*scores)
    assert [list(parts_of(score).items()) for score in read.scores] == [
        [("b", 0.1), ("a", -2.0)], [], [("a", 3.0)],
    ]  # fmt: skip


def test_scores_without_parts_are_saved_as_before(tmp_path: Path) -> None:
    assert part_columns([0.5, 1.0]) == {} and with_parts([0.5], {}) == [0.5]
    _batch(0.5, 1.0).write(tmp_path / "a.npz")
    assert RolloutBatch.read(tmp_path / "a.npz") == _batch(0.5, 1.0)
