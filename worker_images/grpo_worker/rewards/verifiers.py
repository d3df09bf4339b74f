"""What judges answers: the task itself, a user's function in a sandbox, or a server."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import httpx

from grpo_operator.api.data import RewardSpec
from grpo_worker.data.tasks import GymTask, Record, Task
from grpo_worker.rewards.sandbox import Sandbox

ATTEMPTS = 3


class RewardError(RuntimeError):
    """Answers could not be judged; the step must not go on with made-up rewards."""


@dataclass(frozen=True, slots=True)
class Item:
    """One answer, with what it is judged by."""

    index: int
    answer: str
    record: Record

    def wire(self) -> dict[str, Any]:
        """Arguments of a reward function, named as in verl."""
        return asdict(self.record) | {"solution_str": self.answer}


class Verifier(Protocol):
    """Judges answers. ``failures``: how many it could not judge since it was made."""

    failures: int

    def score(self, items: Sequence[Item]) -> list[float]:
        """One reward an item, in order. Raises RewardError when the step must not go on."""


class TaskVerifier:
    """The task's own rule."""

    def __init__(self, task: GymTask) -> None:
        self._task = task
        self.failures = 0

    def score(self, items: Sequence[Item]) -> list[float]:
        return [self._task.score(item.index, item.answer) for item in items]


class FunctionVerifier:
    """A user's function in processes of its own."""

    def __init__(self, spec: RewardSpec) -> None:
        assert spec.function is not None
        self._spec = spec
        self._sandbox = Sandbox(spec.function, spec.workers, spec.timeout_seconds, spec.memory_megabytes)
        self.failures = 0

    def score(self, items: Sequence[Item]) -> list[float]:
        try:
            outcomes = self._sandbox.call([item.wire() for item in items])
        except ValueError as error:  # the function is not there
            raise RewardError(str(error)) from error
        failed = [outcome.problem for outcome in outcomes if outcome.problem]
        self.failures += len(failed)
        if failed and self._spec.on_failure == "stop":
            raise RewardError(f"spec.reward.function={self._spec.function}: {failed[0]}")
        return [outcome.value for outcome in outcomes]


class HttpVerifier:
    """A server. What it does not answer in time is asked again, and then the step stops."""

    def __init__(self, spec: RewardSpec) -> None:
        assert spec.url is not None
        self._url = spec.url
        self._client = httpx.Client(timeout=spec.timeout_seconds)
        self.failures = 0

    def score(self, items: Sequence[Item]) -> list[float]:
        body = {"items": [item.wire() for item in items]}
        for attempt in range(ATTEMPTS):
            try:
                response = self._client.post(self._url, json=body)
                response.raise_for_status()
                return _scores(response.json(), len(items))
            except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
                problem = repr(error)
                self.failures += 1
            if attempt < ATTEMPTS - 1:
                time.sleep(2.0**attempt)
        raise RewardError(f"spec.reward.url={self._url}: {problem}, {ATTEMPTS} times in a row")


def _scores(answer: dict[str, Any], count: int) -> list[float]:
    scores = [float(score) for score in answer["scores"]]
    if len(scores) != count:
        raise ValueError(f"{len(scores)} scores for {count} items")
    return scores


class NoVerifier:
    """A reward model alone judges, later and on the trainer's ranks."""

    failures = 0

    def score(self, items: Sequence[Item]) -> list[float]:
        return [0.0] * len(items)


def verifier_of(task: Task, spec: RewardSpec | None) -> Verifier:
    """What the job judges answers by.

    Raises ValueError for a task without a rule of its own when the job names none.
    """
    if spec is not None:
        if spec.function is None and spec.url is None:
            return NoVerifier()
        return FunctionVerifier(spec) if spec.function else HttpVerifier(spec)
    if not isinstance(task, GymTask):
        raise ValueError("spec.reward: prompts from files need a reward: set function, url or model")
    return TaskVerifier(task)
