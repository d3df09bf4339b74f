"""Figures of a validation set."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_worker.common.reward_parts import Reward
from grpo_worker.controller.validation.scores import SetScores, draws, metrics_of, pass_at


@given(st.integers(1, 7), st.data())
def test_pass_at_k_is_the_share_of_draws_with_a_correct_response(n: int, data: st.DataObject) -> None:
    correct, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    drawn = list(itertools.combinations([True] * correct + [False] * (n - correct), k))
    assert pass_at(k, n, correct) == pytest.approx(sum(any(one) for one in drawn) / len(drawn))


@pytest.mark.parametrize(("n", "expected"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_draws_are_powers_of_two_and_all(n: int, expected: list[int]) -> None:
    assert draws(n) == expected


def test_other_draws_can_be_chosen_and_have_the_same_figures() -> None:
    assert draws(8, [8, 3]) == [3, 8]
    usual, chosen = SetScores(8, 1.0), SetScores(8, 1.0, pass_at=[4, 3])
    for scores in (usual, chosen):
        for prompt in range(5):
            scores.add(prompt, [float(number < prompt) for number in range(8)], tokens=8)
    found = chosen.figures()
    assert [name for name in found if name.startswith("pass@")] == [
        "pass@3/mean", "pass@3/ci95", "pass@4/mean", "pass@4/ci95",
    ]  # fmt: skip
    assert found["pass@3/mean"] == pytest.approx(sum(pass_at(3, 8, correct) for correct in range(5)) / 5)
    assert {name: usual.figures()[name] for name in found if "@3" not in name}.items() <= found.items()


def test_parts_of_rewards_are_not_kept_until_all_prompts_are_scored() -> None:
    scores = SetScores(1, 1.0)
    scores.add(0, [Reward(0.5, {"format": 1.0})], tokens=1)
    assert [type(score) for score in scores.by_prompt[0]] == [float]


def test_the_interval_is_that_of_the_mean_over_prompts() -> None:
    scores = SetScores(2, pass_score=1.0)
    for prompt, values in enumerate([(1.0, 0.0), (0.0, 0.0), (1.0, 1.0)]):
        scores.add(prompt, values, tokens=6)
    found = scores.figures()
    assert found["score/mean"] == 0.5 and found["response_length/mean"] == 3.0
    assert found["score/ci95"] == pytest.approx(1.96 * 0.5 / math.sqrt(3))
    assert found["pass@1/mean"] == 0.5 and found["pass@2/mean"] == pytest.approx(2 / 3)
    assert (found["prompts"], found["refused"]) == (3.0, 0.0)


def test_a_set_whose_prompts_are_all_refused_has_no_score() -> None:
    assert SetScores(1, 1.0, refused=2).figures() == {"prompts": 0.0, "refused": 2.0}


def test_metrics_name_their_set() -> None:
    assert metrics_of({"math": {"score/mean": 0.5}}) == {"val/math/score/mean": 0.5}
