"""When the scores of a validation set have fallen."""

from hypothesis import given
from hypothesis import strategies as st

from grpo_worker.controller.validation.regression import Regression, regression

SCORES = st.lists(st.integers(0, 8).map(lambda eighths: eighths / 8), max_size=40)


def _steps(scores: list[float]) -> list[tuple[int, float]]:
    return [(10 * number, score) for number, score in enumerate(scores)]


def test_scores_have_fallen_when_so_many_in_a_row_are_too_low() -> None:
    scores = _steps([0.25, 0.75, 0.5, 0.5])
    assert regression(scores, 0.125, 2) == Regression(2, 30, 0.5, 10, 0.75, 20)
    assert regression(scores, 0.125, 3) is None
    assert regression(scores, 0.25, 2) is None, "not by more than the margin"
    assert regression(_steps([0.25, 0.75, 0.5, 0.75, 0.5]), 0.125, 2) is None, "not in a row"
    assert regression(_steps([0.25, 0.75, 0.5, 0.5, 0.75]), 0.125, 2) is None, "they have risen again"
    assert regression([], 0.0, 1) is None and regression(_steps([0.5]), 0.0, 1) is None


def test_only_validations_after_a_step_count() -> None:
    scores = _steps([0.75, 0.5, 0.5, 0.5])
    assert regression(scores, 0.125, 2, after=10) is not None
    assert regression(scores, 0.125, 2, after=20) is None
    assert regression(scores, 0.125, 1, after=20) == Regression(1, 30, 0.5, 0, 0.75, 30)


@given(SCORES, st.integers(0, 4).map(lambda eighths: eighths / 8), st.integers(1, 4))
def test_the_last_scores_are_all_below_the_best_one_before_them(
    scores: list[float], margin: float, validations: int
) -> None:
    found = regression(_steps(scores), margin, validations)
    low = [score < max(scores[:number]) - margin if number else False for number, score in enumerate(scores)]
    assert (found is not None) == (len(low) >= validations and all(low[-validations:]))
    if found is not None:
        assert found.best_score == max(scores) and scores[found.best_step // 10] == max(scores)
        assert found.since <= 10 * (len(scores) - validations) and found.since > found.best_step
        assert found.step == 10 * (len(scores) - 1) and found.score == scores[-1]
