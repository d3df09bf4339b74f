"""The reward role: scores responses with the task's own verifier."""

from collections.abc import Sequence

from grpo_worker.data.tasks import Task
from grpo_worker.data.tokenizer import TextTokenizer
from grpo_worker.rollout.sampling import Sample


class RewardManager:
    """Rule rewards, computed on the controller's CPU."""

    def __init__(self, task: Task, tokenizer: TextTokenizer) -> None:
        self._task = task
        self._tokenizer = tokenizer

    def score(self, samples: Sequence[Sample]) -> list[float]:
        """One reward in [0, 1] a sample, in order."""
        return [self._score(sample) for sample in samples]

    def _score(self, sample: Sample) -> float:
        answer = self._tokenizer.decode(list(sample.ids)).strip()
        return self._task.score(sample.prompt_index, answer)
