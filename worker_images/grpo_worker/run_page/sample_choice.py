"""Choice of the steps, groups and answers whose samples are on a page (pure)."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev


@dataclass(frozen=True, slots=True)
class Group:
    """The answers to a prompt. ``scores``: of those that have one. ``gap``: largest mean log-prob gap."""

    prompt: int
    answers: int
    scores: tuple[float, ...]
    gap: float

    @property
    def mean(self) -> float | None:
        """Return the mean score."""
        return fmean(self.scores) if self.scores else None

    @property
    def spread(self) -> float:
        """Return the standard deviation of the scores, which the advantages are relative to."""
        return pstdev(self.scores) if len(self.scores) > 1 else 0.0

    def row(self) -> list[float | None]:
        """Return prompt, number of answers, smallest, mean and largest score, and the gap."""
        low, high = (min(self.scores), max(self.scores)) if self.scores else (None, None)
        return [self.prompt, self.answers, low, self.mean, high, self.gap]


def groups(
    prompts: Iterable[int], scores: Iterable[float | None], gaps: Iterable[float | None]
) -> list[Group]:
    """Return the groups of a step, in the order of its rows, whose prompts, scores and gaps are given."""
    of_prompt: dict[int, list[tuple[float | None, float | None]]] = defaultdict(list)
    for prompt, score, gap in zip(prompts, scores, gaps, strict=True):
        of_prompt[prompt].append((score, gap))
    return [
        Group(
            prompt,
            len(rows),
            tuple(score for score, _ in rows if score is not None),
            max((gap for _, gap in rows if gap is not None), default=0.0),
        )
        for prompt, rows in of_prompt.items()
    ]


def spread_out(values: Sequence[int], most: int) -> list[int]:
    """Return at most ``most`` of the values at equal distances, with the first and the last one."""
    if len(values) <= most:
        return list(values)
    last = len(values) - 1
    if most < 2:
        return list(values[:most])
    return [values[round(at * last / (most - 1))] for at in range(most)]


def telling(found: Sequence[Group], most: int) -> list[Group]:
    """Return the groups that say most of a step, each once.

    In turn: the widest spread of scores, the best and the worst mean score, the largest gap between trainer
    and engines, and then the others in their order.
    """
    if not found:
        return []
    scored = [group for group in found if group.scores]
    first = [max(scored, key=lambda group: group.spread)] if scored else []
    first += [choose(scored, key=lambda group: fmean(group.scores)) for choose in (max, min) if scored]
    first.append(max(found, key=lambda group: group.gap))
    return list({group.prompt: group for group in (*first, *found)}.values())[:most]


def overview(found: Sequence[Group], most: int) -> list[Group]:
    """Return at most ``most`` groups by their mean score, at equal distances."""
    ranked = sorted(found, key=lambda group: (group.mean is not None, group.mean or 0.0))
    return [ranked[at] for at in spread_out(range(len(ranked)), most)]


def ranked_answers(scores: Sequence[float | None], most: int) -> list[int]:
    """Return the places of at most ``most`` answers, the best first, at equal distances in that order."""
    order = sorted(range(len(scores)), key=lambda at: (scores[at] is None, -(scores[at] or 0.0)))
    return [order[at] for at in spread_out(range(len(order)), most)]
