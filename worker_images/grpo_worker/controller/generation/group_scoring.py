"""Groups of one step on their way from engines through the reward."""

import queue
import threading
from concurrent.futures import CancelledError, Future
from functools import partial

from grpo_worker.controller.generation.group import Group, Scores
from grpo_worker.data.prompts import Prompt
from grpo_worker.rollout.sampling import PromptRefusedError, Sample

Scored = tuple[Prompt, list[Sample], list[float]]
_CANCEL_SECONDS = 0.2  # between two looks at ``cancelled``


class GroupScoring:
    """Waits for groups and their rewards, in any order.

    A slow reward delays only its own group, and answers arrive meanwhile.
    """

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[Prompt] = queue.SimpleQueue()
        self._generating: dict[int, Group] = {}
        self._scoring: dict[int, tuple[list[Sample], Scores]] = {}

    @property
    def generating(self) -> bool:
        """False if only rewards are missing."""
        return bool(self._generating)

    def add(self, group: Group) -> None:
        """Add a group that engines generate."""
        prompt = group.prompt
        self._generating[prompt.index] = group
        group.samples.add_done_callback(partial(self._report, prompt))

    def wait(self, cancelled: threading.Event | None) -> list[Scored | PromptRefusedError]:
        """Wait for progress; return the scored groups and refused prompts, in the order of the prompts.

        Raises CancelledError once ``cancelled`` is set, and the errors of generation and reward.
        """
        found: list[Scored | PromptRefusedError] = []
        for prompt in self._next(cancelled):
            group = self._generating.pop(prompt.index, None)
            if group is None:
                samples, scores = self._scoring.pop(prompt.index)
                found.append((prompt, samples, scores.result()))
                continue
            try:
                samples = group.samples.result()
            except PromptRefusedError as error:
                found.append(error)
                continue
            scores = group.score()
            self._scoring[prompt.index] = samples, scores
            scores.add_done_callback(partial(self._report, prompt))
        return found

    def cancel(self) -> None:
        """Stop waiting for the rewards of all groups."""
        for _, scores in self._scoring.values():
            scores.cancel()

    def _report(self, prompt: Prompt, _: Future[list[Sample]] | Scores) -> None:
        self._events.put(prompt)

    def _next(self, cancelled: threading.Event | None) -> list[Prompt]:
        """Wait for at least one event; return the prompts of all, in order."""
        found: list[Prompt] = []
        while not found:
            if cancelled is not None and cancelled.is_set():
                raise CancelledError
            try:
                found.append(self._events.get(timeout=_CANCEL_SECONDS))
            except queue.Empty:
                continue
        while not self._events.empty():
            found.append(self._events.get())
        return sorted(found, key=lambda prompt: prompt.index)
