"""Named parts of rewards, such as format and correctness, beside the scores that are trained on (pure)."""

from collections.abc import Mapping, Sequence
from itertools import islice

import numpy as np

_NO_PARTS: Mapping[str, float] = {}


class Reward(float):
    """A score with the named numbers that a reward function returned beside it.

    It is a number for all that need only the score, so that parts travel as scores do.
    """

    __slots__ = ("parts",)
    parts: Mapping[str, float]

    def __new__(cls, score: float, parts: Mapping[str, float]) -> "Reward":
        reward = super().__new__(cls, score)
        reward.parts = parts
        return reward

    def __reduce__(self) -> tuple[type["Reward"], tuple[float, Mapping[str, float]]]:  # for copies
        return Reward, (float(self), self.parts)


def parts_of(score: float) -> Mapping[str, float]:
    """Return the named parts of a score, which may have none."""
    return score.parts if isinstance(score, Reward) else _NO_PARTS


def part_columns(scores: Sequence[float]) -> dict[str, np.ndarray]:
    """Return the parts of scores as arrays for ``with_parts``; none if no score has parts."""
    every = [parts_of(score) for score in scores]
    places: dict[str, int] = {}
    found = [places.setdefault(name, len(places)) for parts in every for name in parts]
    if not found:
        return {}
    return {
        "part_names": np.array(list(places), dtype=np.str_),
        "part_counts": np.array([len(parts) for parts in every], dtype=np.int64),
        "part_places": np.array(found, dtype=np.int64),
        "part_values": np.array([value for parts in every for value in parts.values()], dtype=np.float64),
    }


def with_parts(scores: Sequence[float], columns: Mapping[str, np.ndarray]) -> list[float]:
    """Return scores with the parts in ``columns``, which may lack them."""
    if "part_names" not in columns:
        return list(scores)
    names = columns["part_names"].tolist()
    pairs = zip(columns["part_places"].tolist(), columns["part_values"].tolist(), strict=True)
    found: list[float] = []
    for score, count in zip(scores, columns["part_counts"].tolist(), strict=True):
        parts = {names[place]: value for place, value in islice(pairs, count)}
        found.append(Reward(score, parts) if parts else score)
    return found
