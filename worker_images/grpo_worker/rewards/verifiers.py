"""Choice of the verifier: the task's own, a function in a sandbox, or a server."""

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
    """Verifier that comes with a reasoning-gym task."""

    def __init__(self, task: GymTask) -> None:
        self._task = task
        self.failures = 0

    def check(self, item: Item) -> None:
        """Judge one answer. Raises RewardError when the verifier fails."""
        try:
            score = self._task.score(item.index, item.answer)
        except Exception as error:  # the task's library may raise anything
            raise RewardError(f"spec.data.train: {self._task.name}'s verifier: {error!r}") from error
        if not math.isfinite(score):
            raise RewardError(f"spec.data.train: {self._task.name}'s verifier gives {score}")

    def score(self, items: Sequence[Item]) -> list[float]:
        """Return the task's reward of each answer."""
        return [self._task.score(item.index, item.answer) for item in items]


class NoVerifier:
    """Placeholder for jobs in which only a reward model judges, on the trainer's ranks."""

    failures = 0

    def check(self, item: Item) -> None:
        """Accept any answer."""

    def score(self, items: Sequence[Item]) -> list[float]:
        """Return 0 for each answer; the reward model's score is added later."""
        return [0.0] * len(items)


def verifier_of(task: Task, spec: RewardSpec | None) -> Verifier:
    """Return the verifier of the job.

    Raises ValueError when the task has no verifier of its own and the job names none.
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
