"""The reward role: scores of samples."""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from grpo_operator.api.v1alpha1.data import RewardSpec
from grpo_worker.common.cpus import available_cpus
from grpo_worker.data.tasks import GymTask, Task
from grpo_worker.data.tokenizer import TextTokenizer
from grpo_worker.rewards.answers import AnswerWorker, Workers
from grpo_worker.rewards.base import Item, Verifier
from grpo_worker.rewards.pool import WorkerPool
from grpo_worker.rewards.verifiers import verifier_of
from grpo_worker.rollout.sampling import Sample

_AT_ONCE = int(RewardSpec.model_fields["workers"].default)  # of jobs whose task judges by itself


class RewardManager:
    """Decoding of samples and judging of their answers, beside the caller's thread."""

    def __init__(
        self,
        task: Task,
        tokenizer: TextTokenizer,
        verifier: Verifier,
        workers: Workers,
        at_once: int = _AT_ONCE,
    ) -> None:
        """``workers``: decode answers. ``at_once``: calls of ``start`` that are judged at the same time."""
        self._task = task
        self._tokenizer = tokenizer
        self._verifier = verifier
        self._workers = workers
        self._threads = ThreadPoolExecutor(at_once, thread_name_prefix="judge")

    @property
    def needs_groups(self) -> bool:
        """True if the samples of a group must be judged in one call."""
        return self._verifier.needs_groups

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
        ids = self._tokenizer.encode(answer)
        if self._verifier.reads_answers:
            self._workers.submit("decode", ids).result()
        self._verifier.check(Item(0, answer, record, ids))

    def close(self) -> None:
        """End the workers."""
        self._workers.close()

    def start(self, samples: Sequence[Sample]) -> Future[list[float]]:
        """Start to judge samples of one group; the result is one reward per sample, in order."""
        return self._threads.submit(self.score, samples)

    def score(self, samples: Sequence[Sample]) -> list[float]:
        """Return one reward per sample, in order."""
        answers = self._answers(samples)
        return self._verifier.score([self._item(s, a) for s, a in zip(samples, answers, strict=True)])

    def _item(self, sample: Sample, answer: str) -> Item:
        record = self._task.record(sample.prompt_index)
        return Item(sample.prompt_index, answer, record, sample.ids, sample.version)

    def _answers(self, samples: Sequence[Sample]) -> list[str]:
        if not self._verifier.reads_answers:
            return [""] * len(samples)
        texts = [self._workers.submit("decode", sample.ids) for sample in samples]
        return [str(text.result()).strip() for text in texts]


def open_reward(
    task: Task,
    tokenizer: TextTokenizer,
    spec: RewardSpec | None,
    start_workers: Callable[[AnswerWorker, int], Workers] = WorkerPool,
) -> RewardManager:
    """Return the job's reward role, with a worker for each answer judged at once, but not more than CPUs.

    ``start_workers``: makes the pool from the object whose methods it runs and the number of processes.
    """
    at_once = _AT_ONCE if spec is None else spec.workers
    own = (task.uri, task.seed) if isinstance(task, GymTask) else ()
    workers = start_workers(AnswerWorker(tokenizer.decoder, *own), min(at_once, available_cpus()))
    return RewardManager(task, tokenizer, verifier_of(task, spec, workers), workers, at_once)


def _text(ground_truth: Any) -> str:
    return ground_truth if isinstance(ground_truth, str) else json.dumps(ground_truth, default=str)
