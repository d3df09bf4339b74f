"""What a job trains on: an endless source of prompts, each with what its answer is judged by."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol
from urllib.parse import parse_qsl

from grpo_worker.data.tokenizer import TextTokenizer

SCHEME = "reasoning-gym:"
_KEPT = 4096  # items in memory: those of a step or two
_SIZE = 2**31 - 1  # items are drawn from (seed, index); the size only bounds the index


@dataclass(frozen=True, slots=True)
class Record:
    """What a reward function is told of an item, under verl's names."""

    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]


class Task(Protocol):
    """Items by index: the same item in every run with the same seed."""

    def prompt(self, index: int, tokenizer: TextTokenizer) -> list[int]:
        """Token ids of the prompt."""

    def record(self, index: int) -> Record:
        """What the answer is judged by."""


@dataclass(frozen=True, slots=True)
class GymTask:
    """A task of reasoning-gym, addressed by ``reasoning-gym:TASK?key=value&...``, with its verifier.

    ``item``: the dataset's items by index; each is drawn once for all the answers to it.
    """

    name: str
    dataset: Any
    item: Callable[[int], dict[str, Any]]

    def prompt(self, index: int, tokenizer: TextTokenizer) -> list[int]:
        return tokenizer.encode(str(self.item(index)["question"]) + "\n")

    def record(self, index: int) -> Record:
        return Record(self.name, self.item(index)["answer"], {"index": index})

    def score(self, index: int, answer: str) -> float:
        """The verifier's reward of an answer to item ``index``, in [0, 1]."""
        return float(self.dataset.score_answer(answer, self.item(index)))


def open_gym(uri: str, seed: int) -> GymTask:
    """Open a task. Raises ValueError that names the key for what reasoning-gym refuses."""
    import reasoning_gym  # with its many needs: only where a job asks for it

    name, _, query = uri.removeprefix(SCHEME).partition("?")
    options = {key: _value(text) for key, text in parse_qsl(query)}
    try:
        dataset = reasoning_gym.create_dataset(name, seed=seed, size=_SIZE, **options)
    except (ValueError, TypeError, AssertionError) as error:
        raise ValueError(f"spec.data.train: {uri!r}: {error}") from error
    return GymTask(name, dataset, lru_cache(_KEPT)(dataset.__getitem__))


def _value(text: str) -> int | float | bool | str:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
