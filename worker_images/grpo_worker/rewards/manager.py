"""The reward role: samples in, scores out."""

from collections.abc import Sequence

from grpo_worker.data.tasks import Task
from grpo_worker.data.tokenizer import TextTokenizer
from grpo_worker.rewards.verifiers import Item, Verifier
from grpo_worker.rollout.sampling import Sample


class RewardManager:
    """Decodes answers and has them judged."""

    def __init__(self, task: Task, tokenizer: TextTokenizer, verifier: Verifier) -> None:
        self._task = task
        self._tokenizer = tokenizer
        self._verifier = verifier

    @property
    def failures(self) -> int:
        """Answers that could not be judged since the controller started."""
        return self._verifier.failures

    def score(self, samples: Sequence[Sample]) -> list[float]:
        """One reward a sample, in order."""
        return self._verifier.score([self._item(sample) for sample in samples])

    def _item(self, sample: Sample) -> Item:
        answer = self._tokenizer.decode(list(sample.ids)).strip()
        return Item(sample.prompt_index, answer, self._task.record(sample.prompt_index))
