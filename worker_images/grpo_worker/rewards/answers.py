"""Work of the controller's answer workers: decoding of answers, and rewards of reasoning-gym's tasks."""

from collections.abc import Sequence
from concurrent.futures import Future
from functools import cached_property
from typing import Any, Protocol

from grpo_worker.data.tasks import GymTask, open_gym
from grpo_worker.data.text_decoder import TextDecoder


class Workers(Protocol):
    """Executor of an AnswerWorker's methods, in other processes."""

    def submit(self, method: str, *arguments: Any) -> Future[Any]:
        """Start a call of ``method``; the arguments are pickled."""

    def close(self) -> None:
        """End the processes, after the calls that were submitted."""


class AnswerWorker:
    """Methods that answer workers run. Can be pickled; opens the task when it is first used."""

    def __init__(self, decoder: TextDecoder, uri: str | None = None, seed: int = 0) -> None:
        """``uri``, ``seed``: of the reasoning-gym task that judges the answers, if one does."""
        self._decoder, self._uri, self._seed = decoder, uri, seed

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of an answer, without special tokens."""
        return self._decoder.decode(ids)

    def score(self, index: int, answer: str) -> float:
        """Return the task's reward of an answer to its item ``index``."""
        return self._task.score(index, answer)

    @cached_property
    def _task(self) -> GymTask:
        assert self._uri is not None, "the job's task has no verifier of its own"
        return open_gym(self._uri, self._seed)
