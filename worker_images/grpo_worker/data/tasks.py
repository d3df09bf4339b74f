"""What a job trains on: an endless source of prompts, each with what its answer is judged by."""

import base64
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, time, timedelta
from functools import lru_cache
from typing import Any, Protocol
from urllib.parse import parse_qsl

import numpy as np

from grpo_operator.api.v1alpha1.data import DataSpec
from grpo_worker.data.tokenizer import TextTokenizer

SCHEME = "reasoning-gym:"
_KEPT = 4096  # items in memory: those of a step or two
_SIZE = 2**31 - 1  # items are drawn from (seed, index); the size only bounds the index


@dataclass(frozen=True, slots=True)
class Record:
    """What an answer is judged by, under verl's names.

    ``prompt``: text or chat messages, as the data has it. ``columns``: all other columns of the row, for
    reward functions that take them by name.
    """

    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    prompt: Any = None
    columns: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Counts:
    """How many rows are trained on, and how many are left out for which reason (as in DataStatus)."""

    rows: int
    too_long: int = 0
    filtered: int = 0
    empty: int = 0


@dataclass(frozen=True, slots=True)
class PromptFormat:
    """How a prompt becomes token ids, whether it comes from files or from a gym.

    ``as_message``: the chat template takes a text as one message of a user. ``variables``: of the template.
    """

    as_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""  # what the log should say of it

    @classmethod
    def of(cls, spec: DataSpec, tokenizer: TextTokenizer) -> "PromptFormat":
        """Choose the format that the job and the model's tokenizer allow."""
        variables = {name: json.loads(value) for name, value in spec.chat_template_kwargs.items()}
        as_message = tokenizer.has_chat_template and not spec.raw
        lacking = not (as_message or spec.raw)
        note = "the model has no chat template: text prompts are given to it as they are" if lacking else ""
        return cls(as_message, variables, note)

    def encode(self, prompt: str | Sequence[dict[str, Any]], tokenizer: TextTokenizer) -> list[int]:
        """Encode a text or chat messages. Raises ValueError when no template takes the messages."""
        if not isinstance(prompt, str):
            return tokenizer.encode_chat(prompt, **self.variables)
        if self.as_message:
            return tokenizer.encode_chat([{"role": "user", "content": prompt}], **self.variables)
        return tokenizer.encode(prompt)


class UnusablePromptError(ValueError):
    """A row has no prompt that the model can be given."""


def read_prompt(value: Any) -> str | list[dict[str, Any]]:
    """Read text, or messages without the empty keys that a Parquet file fills in.

    Raises UnusablePromptError for none and for broken messages, TypeError for what is neither of the two.
    """
    value = jsonable(value)
    if value is None or value == [] or (isinstance(value, str) and not value.strip()):
        raise UnusablePromptError("there is no prompt")
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise TypeError(f"{str(value)[:80]!r} is neither text nor messages")
    for number, message in enumerate(value):
        said = isinstance(message.get("content"), str | list) or message.get("tool_calls")
        if not isinstance(message.get("role"), str) or not said:
            raise UnusablePromptError(f"message {number} has no role or no content")
    return [{key: part for key, part in message.items() if part is not None} for message in value]


class Task(Protocol):
    """Items by index: the same item in every run with the same seed."""

    @property
    def counts(self) -> Counts | None:
        """How many rows there are, and how many are left out; None for a task without end."""

    @property
    def notes(self) -> list[str]:
        """Sentences for the log: what was left out, and why."""

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
    format: PromptFormat = PromptFormat()

    @property
    def counts(self) -> None:
        return None

    @property
    def notes(self) -> list[str]:
        return [self.format.note] if self.format.note else []

    def prompt(self, index: int, tokenizer: TextTokenizer) -> list[int]:
        question = str(self.item(index)["question"])
        # The template says where a message ends; a text by itself needs a line's end for that.
        return self.format.encode(question if self.format.as_message else question + "\n", tokenizer)

    def record(self, index: int) -> Record:
        item = self.item(index)
        answer = item["answer"]
        return Record(self.name, answer, {"index": index}, str(item["question"]), {"answer": answer})

    def score(self, index: int, answer: str) -> float:
        """The verifier's reward of an answer to item ``index``, in [0, 1]."""
        return float(self.dataset.score_answer(answer, self.item(index)))


def open_gym(uri: str, seed: int, prompt_format: PromptFormat | None = None) -> GymTask:
    """Open a task; by default its questions are given as they are.

    Raises ValueError that names the key for what reasoning-gym refuses.
    """
    import reasoning_gym  # with its many needs: only where a job asks for it

    name, _, query = uri.removeprefix(SCHEME).partition("?")
    options = {key: _value(text) for key, text in parse_qsl(query)}
    try:
        dataset = reasoning_gym.create_dataset(name, seed=seed, size=_SIZE, **options)
    except (ValueError, TypeError, AssertionError) as error:
        raise ValueError(f"spec.data.train: {uri!r}: {error}") from error
    item = lru_cache(_KEPT)(dataset.__getitem__)
    return GymTask(name, dataset, item, prompt_format or PromptFormat())


def _value(text: str) -> int | float | bool | str:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def jsonable(value: Any) -> Any:
    """Make plain Python values of what a Parquet file may hold, so that a reward server can be sent them."""
    if isinstance(value, np.ndarray | np.generic):
        return jsonable(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): jsonable(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(part) for part in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, bytes):
        return _text(value)
    if isinstance(value, timedelta):
        return value.total_seconds()
    return value.isoformat() if isinstance(value, date | time) else str(value)


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return base64.b64encode(data).decode()
