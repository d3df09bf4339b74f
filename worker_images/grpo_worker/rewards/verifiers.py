"""Choice of the verifier: the task's own, a function in a sandbox, or a server."""

import math
from collections.abc import Sequence

from grpo_operator.api.v1alpha1.data import RewardSpec
from grpo_worker.data.tasks import GymTask, Task
from grpo_worker.rewards.answers import Workers
from grpo_worker.rewards.base import Item, RewardError, Verifier
from grpo_worker.rewards.function import FunctionVerifier
from grpo_worker.rewards.pool import WorkError
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
    """Verifier that comes with a reasoning-gym task. It runs in the answer workers."""

    reads_answers = True
    needs_groups = False

    def __init__(self, task: GymTask, workers: Workers) -> None:
        self._task = task
        self._workers = workers
        self.failures = 0

    def check(self, item: Item) -> None:
        """Judge one answer. Raises RewardError when the verifier fails."""
        try:
            score = self.score([item])[0]
        except WorkError as error:
            raise RewardError(f"spec.data.train: {self._task.name}'s verifier: {error}") from error
        if not math.isfinite(score):
            raise RewardError(f"spec.data.train: {self._task.name}'s verifier gives {score}")

    def score(self, items: Sequence[Item]) -> list[float]:
        """Return the task's reward of each answer. Raises WorkError when the task's verifier fails."""
        calls = [self._workers.submit("score", item.index, item.answer) for item in items]
        return [float(call.result()) for call in calls]


class NoVerifier:
    """Placeholder for jobs in which only a reward model judges, on the trainer's ranks."""

    reads_answers = False
    needs_groups = False
    failures = 0

    def check(self, item: Item) -> None:
        """Accept any answer."""

    def score(self, items: Sequence[Item]) -> list[float]:
        """Return 0 for each answer; the reward model's score is added later."""
        return [0.0] * len(items)


def verifier_of(task: Task, spec: RewardSpec | None, workers: Workers) -> Verifier:
    """Return the verifier of the job. ``workers``: run the verifier of the task itself.

    Raises ValueError when the task has no verifier of its own and the job names none.
    """
    if spec is None:
        if not isinstance(task, GymTask):
            raise ValueError(
                "spec.reward: prompts from files need a reward: set function, builtin, url or model"
            )
        return TaskVerifier(task, workers)
    if spec.url is not None:
        return HttpVerifier(spec)
    return NoVerifier() if spec.function is None and spec.builtin is None else FunctionVerifier(spec)
