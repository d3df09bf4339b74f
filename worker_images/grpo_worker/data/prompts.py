"""Source of prompts whose position and prompts in flight are part of every checkpoint."""

import threading
from dataclasses import dataclass
from typing import Any

from grpo_worker.data.tasks import Task
from grpo_worker.data.tokenizer import TextTokenizer

TRIES = 1000  # prompts in a row that may be too long


@dataclass(frozen=True, slots=True)
class Prompt:
    """A task item as token ids. ``index`` identifies the item in every attempt of the job."""

    index: int
    ids: tuple[int, ...]


class PromptSource:
    """Prompts in index order; those that were taken but not trained on are taken again after a restart.

    Items whose prompt is longer than ``promptLength`` are skipped: the cursor passes them and they are never
    in flight, so a restart skips the same items.
    """

    def __init__(self, task: Task, tokenizer: TextTokenizer, prompt_length: int) -> None:
        self._task = task
        self._tokenizer = tokenizer
        self._prompt_length = prompt_length
        self._cursor = 0
        self._in_flight: list[int] = []
        self._trained: frozenset[int] = frozenset()  # in flight, but of a step that is trained
        self._too_long = 0
        self._lock = threading.Lock()  # a step may take prompts while the one before is trained on

    @property
    def too_long(self) -> int:
        """Number of items skipped up to the cursor, without the rows that a FileTask leaves out."""
        return self._too_long

    def check(self) -> None:
        """Check the next prompt. Raises ValueError when none fits or the chat template refuses it."""
        self._next_that_fits(self._cursor)

    def take(self, count: int, after: int = 0) -> list[Prompt]:
        """Return the next ``count`` prompts; those in flight at the last checkpoint come first.

        ``after``: number of prompts already taken for this step.

        Raises ValueError when none of TRIES consecutive prompts fits in ``promptLength``.
        """
        again = [self._prompt(index) for index in self._in_flight[after : after + count]]
        fresh: list[Prompt] = []
        cursor = self._cursor
        while len(again) + len(fresh) < count:
            prompt = self._next_that_fits(cursor)
            fresh.append(prompt)
            cursor = prompt.index + 1
        with self._lock:
            self._too_long += cursor - self._cursor - len(fresh)
            self._cursor = cursor
            self._in_flight.extend(prompt.index for prompt in fresh)
        return again + fresh

    def put_back(self, prompts: list[Prompt]) -> None:
        """Move prompts that were taken behind all others in flight: they belong to a later step."""
        back = {prompt.index for prompt in prompts}
        with self._lock:
            self._in_flight = [i for i in self._in_flight if i not in back] + [p.index for p in prompts]

    def trained(self, prompts: list[Prompt]) -> None:
        """Leave these prompts out of checkpoints: their step is trained, and ``consumed`` follows.

        Until then they stay in flight, because ``take`` counts them for the step after it.
        """
        self._trained = frozenset(prompt.index for prompt in prompts)

    def consumed(self, prompts: list[Prompt]) -> None:
        """Record that these prompts were used in an optimizer step."""
        used = {prompt.index for prompt in prompts}
        with self._lock:
            self._in_flight = [index for index in self._in_flight if index not in used]
            self._trained = frozenset()

    def behind_drawn(self) -> dict[str, Any]:
        """Return the state from which none of the prompts that were drawn so far comes again."""
        with self._lock:
            return {"cursor": self._cursor, "in_flight": [], "too_long": self._too_long}

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        with self._lock:
            in_flight = [index for index in self._in_flight if index not in self._trained]
            return {"cursor": self._cursor, "in_flight": in_flight, "too_long": self._too_long}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self._cursor = int(state["cursor"])
        self._in_flight = [int(index) for index in state["in_flight"]]
        self._trained = frozenset()
        self._too_long = int(state.get("too_long", 0))  # older checkpoints have none

    def _next_that_fits(self, cursor: int) -> Prompt:
        shortest = 0
        for index in range(cursor, cursor + TRIES):
            prompt = self._prompt(index)
            if len(prompt.ids) <= self._prompt_length:
                return prompt
            shortest = min(shortest or len(prompt.ids), len(prompt.ids))
        raise ValueError(
            f"spec.data.promptLength={self._prompt_length}: none of {TRIES} consecutive prompts fits, the "
            f"shortest has {shortest} tokens: raise it, or choose easier task options in spec.data.train"
        )

    def _prompt(self, index: int) -> Prompt:
        return Prompt(index, tuple(self._task.prompt(index, self._tokenizer)))
