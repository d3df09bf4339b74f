"""Prompt source with a cursor: what was handed out, what is in flight, what is next."""

from dataclasses import dataclass
from typing import Any

from grpo_worker.data.tasks import Task
from grpo_worker.data.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class Prompt:
    """One task item as token ids. ``index`` identifies it for ever."""

    index: int
    ids: tuple[int, ...]


class PromptSource:
    """Hands out each index once; indices taken but not consumed survive a restart."""

    def __init__(self, task: Task, tokenizer: TextTokenizer, prompt_length: int) -> None:
        self._task = task
        self._tokenizer = tokenizer
        self._prompt_length = prompt_length
        self._cursor = 0
        self._in_flight: list[int] = []

    def take(self, count: int, after: int = 0) -> list[Prompt]:
        """The next ``count`` prompts; those in flight at the last checkpoint come first.

        ``after``: how many of this step's prompts were taken before.

        Raises ValueError for a prompt longer than ``promptLength``.
        """
        again = self._in_flight[after : after + count]
        fresh = range(self._cursor, self._cursor + count - len(again))
        prompts = [self._prompt(index) for index in (*again, *fresh)]
        self._cursor += len(fresh)
        self._in_flight.extend(fresh)
        return prompts

    def consumed(self, prompts: list[Prompt]) -> None:
        """These prompts went into an optimizer step."""
        gone = {prompt.index for prompt in prompts}
        self._in_flight = [index for index in self._in_flight if index not in gone]

    def state_dict(self) -> dict[str, Any]:
        return {"cursor": self._cursor, "in_flight": list(self._in_flight)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._cursor = int(state["cursor"])
        self._in_flight = [int(index) for index in state["in_flight"]]

    def _prompt(self, index: int) -> Prompt:
        ids = self._task.prompt(index, self._tokenizer)
        if len(ids) > self._prompt_length:
            raise ValueError(
                f"prompt {index} has {len(ids)} tokens, spec.data.promptLength is "
                f"{self._prompt_length}: raise it or choose easier task options"
            )
        return Prompt(index, tuple(ids))
