"""Prompt source with a cursor: what was handed out, what is in flight, what is next."""

from dataclasses import dataclass
from typing import Any

from grpo_worker.data.tasks import Task
from grpo_worker.data.tokenizer import TextTokenizer

TRIES = 1000  # prompts in a row that may be too long


@dataclass(frozen=True, slots=True)
class Prompt:
    """One task item as token ids. ``index`` identifies it for ever."""

    index: int
    ids: tuple[int, ...]


class PromptSource:
    """Hands out each index once; indices taken but not consumed survive a restart.

    Items whose prompt is longer than ``promptLength`` are skipped: the cursor passes them and they are never
    in flight, so that a restart and a replay skip the same ones.
    """

    def __init__(self, task: Task, tokenizer: TextTokenizer, prompt_length: int) -> None:
        self._task = task
        self._tokenizer = tokenizer
        self._prompt_length = prompt_length
        self._cursor = 0
        self._in_flight: list[int] = []
        self._too_long = 0

    @property
    def too_long(self) -> int:
        """How many items were skipped up to the cursor; rows of files are left out before, and not among
        them."""
        return self._too_long

    def check(self) -> None:
        """Raises ValueError when no prompt fits, or when the chat template refuses the first one."""
        self._next_that_fits(self._cursor)

    def take(self, count: int, after: int = 0) -> list[Prompt]:
        """The next ``count`` prompts; those in flight at the last checkpoint come first.

        ``after``: how many of this step's prompts were taken before.

        Raises ValueError when not one of many prompts in a row fits in ``promptLength``.
        """
        again = [self._prompt(index) for index in self._in_flight[after : after + count]]
        fresh: list[Prompt] = []
        cursor = self._cursor
        while len(again) + len(fresh) < count:
            prompt = self._next_that_fits(cursor)
            fresh.append(prompt)
            cursor = prompt.index + 1
        self._too_long += cursor - self._cursor - len(fresh)
        self._cursor = cursor
        self._in_flight.extend(prompt.index for prompt in fresh)
        return again + fresh

    def consumed(self, prompts: list[Prompt]) -> None:
        """These prompts went into an optimizer step."""
        gone = {prompt.index for prompt in prompts}
        self._in_flight = [index for index in self._in_flight if index not in gone]

    def state_dict(self) -> dict[str, Any]:
        return {"cursor": self._cursor, "in_flight": list(self._in_flight), "too_long": self._too_long}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._cursor = int(state["cursor"])
        self._in_flight = [int(index) for index in state["in_flight"]]
        self._too_long = int(state.get("too_long", 0))  # older checkpoints have none

    def _next_that_fits(self, cursor: int) -> Prompt:
        shortest = 0
        for index in range(cursor, cursor + TRIES):
            prompt = self._prompt(index)
            if len(prompt.ids) <= self._prompt_length:
                return prompt
            shortest = min(shortest or len(prompt.ids), len(prompt.ids))
        raise ValueError(
            f"spec.data.promptLength is {self._prompt_length}: none of {TRIES} prompts in a row fits, the "
            f"shortest has {shortest} tokens: raise it, or choose easier task options in spec.data.train"
        )

    def _prompt(self, index: int) -> Prompt:
        return Prompt(index, tuple(self._task.prompt(index, self._tokenizer)))
