"""Group: a prompt's samples on their way from engines through the reward."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

from grpo_worker.data.prompts import Prompt
from grpo_worker.rollout.sampling import Sample

Scores = Future[list[float]]


class GroupClient(Protocol):
    """The part of RolloutClient that a sampler uses."""

    def submit(
        self, prompt: Prompt, version: int, arrived: Callable[[Sample], None] | None = None
    ) -> Future[list[Sample]]:
        """Start to generate the samples of a prompt; ``arrived`` gets each as soon as it is complete."""

    def forget(self) -> None:
        """Forget what is left of groups that no engine served."""


class Scorer(Protocol):
    """The part of RewardManager that judges samples."""

    @property
    def needs_groups(self) -> bool:
        """True if the samples of a group must be judged in one call."""

    def start(self, samples: Sequence[Sample]) -> Scores:
        """Start to judge samples of one group; the result is one reward per sample, in order."""


class Group:
    """Samples that engines generate, and the rewards of those that have arrived.

    ``samples``: all of them, in the order of their numbers. Each is judged when it arrives, unless the reward
    needs all of them.
    """

    def __init__(self, prompt: Prompt, version: int, client: GroupClient, reward: Scorer) -> None:
        self.prompt = prompt
        self._reward = reward
        self._scores: dict[int, Scores] = {}  # by the number of the sample
        self._scored = False
        arrived = None if reward.needs_groups else self._judge
        self.samples = client.submit(prompt, version, arrived)

    @property
    def judged(self) -> int:
        """Number of answers whose judging has begun before all had arrived."""
        return len(self._scores)

    @property
    def failed(self) -> bool:
        """True if the samples were not generated."""
        samples = self.samples
        return samples.cancelled() or (samples.done() and samples.exception() is not None)

    def score(self) -> Scores:
        """Return the rewards of the samples, all of which have arrived.

        A later call judges those samples again whose judging has failed.
        """
        samples = self.samples.result()
        if self._reward.needs_groups:
            return self._reward.start(samples)
        for sample in samples:
            scores = self._scores.get(sample.number)
            if scores is None or (self._scored and _has_failed(scores)):
                self._judge(sample)
        self._scored = True
        return _joined([self._scores[sample.number] for sample in samples])

    def cancel(self) -> None:
        """Cancel the generation and the judging of what has arrived."""
        self.samples.cancel()
        for scores in list(self._scores.values()):
            scores.cancel()

    def _judge(self, sample: Sample) -> None:
        self._scores[sample.number] = self._reward.start([sample])


def _has_failed(scores: Scores) -> bool:
    return scores.cancelled() or (scores.done() and scores.exception() is not None)


def _joined(parts: Sequence[Scores]) -> Scores:
    """Return all results in order, or the first part's error in that order."""
    whole: Scores = Future()
    lock, left = threading.Lock(), len(parts)

    def ended(_: Scores) -> None:
        nonlocal left
        with lock:
            left -= 1
            if left:
                return
        if any(part.cancelled() for part in parts):
            whole.cancel()
        if not whole.set_running_or_notify_cancel():
            return
        error = next((part.exception() for part in parts if part.exception() is not None), None)
        if error is not None:
            whole.set_exception(error)
        else:
            whole.set_result([score for part in parts for score in part.result()])

    for part in parts:
        part.add_done_callback(ended)
    return whole
