"""Decides whether the scores of a validation set have fallen for good (pure)."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Regression:
    """Scores below the best one. ``validations``: so many in a row, the last with ``score`` at ``step``.

    ``since``: step of the first of them.
    """

    validations: int
    step: int
    score: float
    best_step: int
    best_score: float
    since: int

    def text(self, name: str | None, margin: float) -> str:
        """Return the sentence that says so of the set ``name``."""
        return (
            f"the mean score of {name} was more than {margin:g} below its best one, {self.best_score:.4g} at "
            f"step {self.best_step}, in {self.validations} validations in a row, the last with "
            f"{self.score:.4g} at step {self.step}"
        )


def regression(
    scores: Iterable[tuple[int, float]], margin: float, validations: int, after: int = -1
) -> Regression | None:
    """Return how the scores have fallen; None unless the last ones are too low.

    ``scores``: steps and mean scores, in the order of the steps. Each of the last ``validations`` must be
    more than ``margin`` below the best one before it, and after step ``after``. The same scores give the same
    result, so a replay decides as the run before it did.
    """
    best: tuple[float, int] | None = None
    low, since, last = 0, -1, (-1, 0.0)
    for step, score in scores:
        fallen = best is not None and score < best[0] - margin
        low = low + 1 if fallen and step > after else 0
        since = step if low == 1 else since
        last = step, score
        if best is None or score > best[0]:
            best = score, step
    if best is None or low < validations:
        return None
    return Regression(low, *last, best_step=best[1], best_score=best[0], since=since)
