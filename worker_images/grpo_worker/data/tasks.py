"""Tasks: endless sources of prompts, each with a record by which responses are judged."""

import base64
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, time, timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import parse_qsl

import numpy as np

if TYPE_CHECKING:  # the workers that judge answers import this module but not transformers
    from grpo_operator.api.v1alpha1.data import DataSpec
    from grpo_worker.data.tokenizer import TextTokenizer

SCHEME = "reasoning-gym:"
_KEPT = 4096  # items in memory, enough for one or two steps
_SIZE = 2**31 - 1  # items are drawn from (seed, index); the size only bounds the index


@dataclass(frozen=True, slots=True)
class Record:
    """Data by which a response is judged, under verl's names.

    ``prompt``: text or chat messages, as in the data. ``columns``: all other columns of the row, for reward
    functions that take them by name.
    """

    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    prompt: Any = None
    columns: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Counts:
    """Number of rows that are trained on, and of those left out by reason (as in DataStatus)."""

    rows: int
    too_long: int = 0
    filtered: int = 0
    empty: int = 0


@dataclass(frozen=True, slots=True)
class PromptFormat:
    """Conversion of a prompt, from files or from a gym, to token ids.

    ``as_message``: apply the chat template to a text as one user message. ``variables``: of the template.
    """

    as_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""  # sentence for the log

    @classmethod
    def of(cls, spec: "DataSpec", tokenizer: "TextTokenizer") -> "PromptFormat":
        """Choose the format that the job and the model's tokenizer allow."""
        variables = {name: json.loads(value) for name, value in spec.chat_template_kwargs.items()}
        as_message = tokenizer.has_chat_template and not spec.raw
        no_template = not (as_message or spec.raw)
        note = "the model has no chat template: text prompts are used unchanged" if no_template else ""
        return cls(as_message, variables, note)

    def encode(self, prompt: str | Sequence[dict[str, Any]], tokenizer: "TextTokenizer") -> list[int]:
        """Encode a text or chat messages. Raises ValueError when the template is missing or refuses them."""
        if not isinstance(prompt, str):
            return tokenizer.encode_chat(prompt, **self.variables)
        if self.as_message:
            return tokenizer.encode_chat([{"role": "user", "content": prompt}], **self.variables)
        return tokenizer.encode(prompt)


class UnusablePromptError(ValueError):
    """A row has no usable prompt."""


def read_prompt(value: Any) -> str | list[dict[str, Any]]:
    """Return a prompt as text, or as messages without the null keys that Parquet files add.

    Raises UnusablePromptError for a missing prompt or broken messages, TypeError for other types.
    """
    value = jsonable(value)
    if value is None or value == [] or (isinstance(value, str) and not value.strip()):
        raise UnusablePromptError("there is no prompt")
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise TypeError(f"{str(value)[:80]!r} is neither text nor messages")
    for number, message in enumerate(value):
        has_content = isinstance(message.get("content"), str | list) or message.get("tool_calls")
        if not isinstance(message.get("role"), str) or not has_content:
            raise UnusablePromptError(f"message {number} has no role or no content")
    return [{key: part for key, part in message.items() if part is not None} for message in value]


class Task(Protocol):
    """Items by index: the same item in every run with the same seed."""

    @property
    def counts(self) -> Counts | None:
        """Numbers of rows used and left out; None for a task that generates its items."""

    @property
    def notes(self) -> list[str]:
        """Sentences for the log, such as why rows were left out."""

    def prompt(self, index: int, tokenizer: "TextTokenizer") -> list[int]:
        """Return the token ids of a prompt."""

    def record(self, index: int) -> Record:
        """Return the record by which responses are judged."""


@dataclass(frozen=True, slots=True)
class GymTask:
    """A task of reasoning-gym, addressed by ``reasoning-gym:TASK?key=value&...``, with its verifier.

    ``item``: returns an item by index; each is drawn once for all responses to it. ``uri``, ``seed``: with
    which ``open_gym`` opens the same task in another process.
    """

    uri: str
    seed: int
    name: str
    dataset: Any
    item: Callable[[int], dict[str, Any]]
    format: PromptFormat = PromptFormat()

    @property
    def counts(self) -> None:
        """None: the task generates its items."""
        return None

    @property
    def notes(self) -> list[str]:
        """Sentences for the log."""
        return [self.format.note] if self.format.note else []

    def prompt(self, index: int, tokenizer: "TextTokenizer") -> list[int]:
        """Return the token ids of a question."""
        question = str(self.item(index)["question"])
        # A template marks the end of a message; a plain text ends with a newline instead.
        return self.format.encode(question if self.format.as_message else question + "\n", tokenizer)

    def record(self, index: int) -> Record:
        """Return the record by which responses are judged."""
        item = self.item(index)
        answer = item["answer"]
        return Record(self.name, answer, {"index": index}, str(item["question"]), {"answer": answer})

    def score(self, index: int, answer: str) -> float:
        """Return the verifier's reward of an answer to item ``index``, in [0, 1]."""
        return float(self.dataset.score_answer(answer, self.item(index)))


def open_gym(uri: str, seed: int, prompt_format: PromptFormat | None = None) -> GymTask:
    """Open a task; by default its questions are used as plain text.

    Raises ValueError with reasoning-gym's message when it refuses the task or an option.
    """
    import reasoning_gym  # imports many libraries, so only jobs that use it import it

    name, _, query = uri.removeprefix(SCHEME).partition("?")
    options = {key: _value(text) for key, text in parse_qsl(query)}
    try:
        dataset = reasoning_gym.create_dataset(name, seed=seed, size=_SIZE, **options)
    except (ValueError, TypeError, AssertionError) as error:
        raise ValueError(f"spec.data.train: {uri!r}: {error}") from error
    item = lru_cache(_KEPT)(dataset.__getitem__)
    return GymTask(uri, seed, name, dataset, item, prompt_format or PromptFormat())


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
    """Convert a value from a Parquet file to JSON's types, so that it can be sent to a reward server."""
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
