"""What judges answers: the task itself, a function in a sandbox, or a server."""

import math
from collections.abc import Sequence

from grpo_operator.api.v1alpha1.data import RewardSpec
from grpo_worker.data.tasks import GymTask, Task
from grpo_worker.rewards.base import Item, RewardError, Verifier
from grpo_worker.rewards.function import FunctionVerifier
from grpo_worker.rewards.server import HttpVerifier

__all__ = [
    "FunctionVerifier",
    "HttpVerifier",
    "Item",
    "NoVerifier",
    "RewardError",
    "TaskVerifier",
    "Verifier",
    "verifier_of",
]


class TaskVerifier:
    """The task's own rule."""

    def __init__(self, task: GymTask) -> None:
        self._task = task
        self.failures = 0

    def check(self, item: Item) -> None:
        try:
            score = self._task.score(item.index, item.answer)
        except Exception as error:  # whatever the task's library raises
            raise RewardError(f"spec.data.train: {self._task.name}'s verifier: {error!r}") from error
        if not math.isfinite(score):
            raise RewardError(f"spec.data.train: {self._task.name}'s verifier gives {score}")

    def score(self, items: Sequence[Item]) -> list[float]:
        return [self._task.score(item.index, item.answer) for item in items]


class NoVerifier:
    """A reward model alone judges, later and on the trainer's ranks."""

    failures = 0

    def check(self, item: Item) -> None:
        """Nothing is judged here."""

    def score(self, items: Sequence[Item]) -> list[float]:
        return [0.0] * len(items)


def verifier_of(task: Task, spec: RewardSpec | None) -> Verifier:
    """Choose what judges the job's answers.

    Raises ValueError for a task without a rule of its own when the job names none.
    """
    if spec is None:
        if not isinstance(task, GymTask):
            raise ValueError(
                "spec.reward: prompts from files need a reward: set function, builtin, url or model"
            )
        return TaskVerifier(task)
    if spec.url is not None:
        return HttpVerifier(spec)
    return NoVerifier() if spec.function is None and spec.builtin is None else FunctionVerifier(spec)
