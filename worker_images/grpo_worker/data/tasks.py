"""Prompts and verifiers from reasoning-gym, addressed by ``reasoning-gym:TASK?key=value&...``."""

from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

import reasoning_gym

SCHEME = "reasoning-gym:"
_SIZE = 2**31 - 1  # items are drawn from (seed, index); the size only bounds the index


@dataclass(frozen=True, slots=True)
class Task:
    """One endless, seeded task. Item ``index`` is the same in every run."""

    dataset: Any

    def question(self, index: int) -> str:
        return str(self.dataset[index]["question"])

    def score(self, index: int, answer: str) -> float:
        """The verifier's reward of an answer to item ``index``, in [0, 1]."""
        return float(self.dataset.score_answer(answer, self.dataset[index]))


def open_task(uri: str, seed: int) -> Task:
    """Open a task. Raises ValueError that names the key for what reasoning-gym refuses."""
    name, _, query = uri.removeprefix(SCHEME).partition("?")
    options = {key: _value(text) for key, text in parse_qsl(query)}
    try:
        dataset = reasoning_gym.create_dataset(name, seed=seed, size=_SIZE, **options)
    except (ValueError, TypeError, AssertionError) as error:
        raise ValueError(f"spec.data.train: {uri!r}: {error}") from error
    return Task(dataset)


def _value(text: str) -> int | float | bool | str:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
