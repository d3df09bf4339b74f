"""The reward role: scores of samples."""

import json
from collections.abc import Sequence
from typing import Any

from grpo_worker.data.tasks import Task
from grpo_worker.data.tokenizer import TextTokenizer
from grpo_worker.rewards.base import Item, Verifier
from grpo_worker.rollout.sampling import Sample


class RewardManager:
    """Decoding of samples and judging of their answers."""

    def __init__(self, task: Task, tokenizer: TextTokenizer, verifier: Verifier) -> None:
        self._task = task
        self._tokenizer = tokenizer
        self._verifier = verifier

    @property
    def failures(self) -> int:
        """Number of answers that could not be judged since the controller started."""
        return self._verifier.failures

    def check(self) -> None:
        """Judge the first row's ground truth as if it were an answer, before anything expensive starts.

        Raises RewardError when that fails, regardless of ``onFailure``, and ConnectionError while a reward
        server is not up yet.
        """
        record = self._task.record(0)
        answer = _text(record.ground_truth)
        self._verifier.check(Item(0, answer, record, tuple(self._tokenizer.encode(answer))))

    def score(self, samples: Sequence[Sample]) -> list[float]:
        """Return one reward per sample, in order."""
        return self._verifier.score([self._item(sample) for sample in samples])

    def _item(self, sample: Sample) -> Item:
        answer = self._tokenizer.decode(list(sample.ids)).strip()
        record = self._task.record(sample.prompt_index)
        return Item(sample.prompt_index, answer, record, tuple(sample.ids), sample.version)


def _text(ground_truth: Any) -> str:
    return ground_truth if isinstance(ground_truth, str) else json.dumps(ground_truth, default=str)
