"""Figures of one validation set: mean score, pass@k, and how certain they are (pure)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_NORMAL_95 = 1.96  # standard deviations on each side of a mean that hold 95 % of a normal distribution


@dataclass(slots=True)
class SetScores:
    """Scores of the responses to each prompt of a set, as far as they have arrived.

    ``n``: responses to a prompt. ``pass_score``: from which a response counts as correct. ``pass_at``: see
    ``draws``. ``refused``: prompts that engines refuse.
    """

    n: int
    pass_score: float
    pass_at: Sequence[int] = ()
    by_prompt: dict[int, Sequence[float]] = field(default_factory=dict)
    tokens: int = 0
    refused: int = 0

    def add(self, prompt: int, scores: Sequence[float], tokens: int) -> None:
        """Add the scores of a prompt's responses, which have so many tokens together."""
        self.by_prompt[prompt] = tuple(map(float, scores))  # without their parts, which need more memory
        self.tokens += tokens

    def figures(self) -> dict[str, float]:
        """Return the figures by name; only ``prompts`` and ``refused`` if no prompt was scored."""
        groups = [self.by_prompt[prompt] for prompt in sorted(self.by_prompt)]
        counts = {"prompts": float(len(groups)), "refused": float(self.refused)}
        if not groups:
            return counts
        found = _mean("score", [sum(group) / len(group) for group in groups])
        found["response_length/mean"] = self.tokens / (len(groups) * self.n)
        correct = [sum(score >= self.pass_score for score in group) for group in groups]
        for k in draws(self.n, self.pass_at):
            found |= _mean(f"pass@{k}", [pass_at(k, self.n, count) for count in correct])
        return found | counts


def draws(n: int, wanted: Sequence[int] = ()) -> list[int]:
    """Return the numbers of draws for which pass@k is reported.

    ``wanted``: these numbers; (): powers of two up to ``n``, and ``n``.
    """
    return sorted(wanted or {2**power for power in range(n.bit_length()) if 2**power <= n} | {n})


def pass_at(k: int, n: int, correct: int) -> float:
    """Return the chance that at least one of ``k`` of ``n`` responses is correct, without bias.

    Source: Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1.
    """
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def _mean(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return the mean and half of its 95 % confidence interval, over prompts."""
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / max(1, len(values) - 1)
    return {f"{name}/mean": mean, f"{name}/ci95": _NORMAL_95 * math.sqrt(variance / len(values))}


def metrics_of(figures: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics of all sets. ``figures``: of each set, by its name."""
    return {
        f"val/{name}/{figure}": value for name, found in figures.items() for figure, value in found.items()
    }
