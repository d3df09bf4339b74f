"""Sampler of one step: generates and scores groups, with or without dynamic sampling."""

import threading
from concurrent.futures import CancelledError

import numpy as np

from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_worker.data.prompts import Prompt, PromptSource
from grpo_worker.metrics.timing import StepTimer
from grpo_worker.rewards.manager import RewardManager
from grpo_worker.rollout.batch_file import RolloutBatch
from grpo_worker.rollout.client import RolloutClient
from grpo_worker.rollout.sampling import Sample
from grpo_worker.weightsync.protocol.version import Version


class StepSampler:
    """Turns prompts into scored groups. A replay of a step draws the same prompts in the same order."""

    def __init__(
        self, spec: GRPOJobSpec, source: PromptSource, client: RolloutClient, reward: RewardManager
    ) -> None:
        self._n = spec.algorithm.samples_per_prompt
        self._batch_size = spec.data.train_batch_size
        self._filter = spec.algorithm.filter_groups
        self._source = source
        self._client = client
        self._reward = reward

    def sample(
        self,
        version: Version,
        timer: StepTimer,
        skip: int = 0,
        cancelled: threading.Event | None = None,
    ) -> RolloutBatch:
        """Return the groups of one step, sampled at ``version``.

        ``skip``: prompts that were drawn but belong to the step before. ``cancelled``: raise CancelledError
        once it is set.

        With filterGroups, groups whose scores are all equal are left out, and others are drawn in their
        place, up to maxNumGenBatches times. After that, left-out groups fill the batch, so that its size is
        constant.
        """
        result, spare = RolloutBatch(), RolloutBatch()
        rounds = self._filter.max_num_gen_batches if self._filter else 1
        for _ in range(rounds):
            missing = self._batch_size - len(result.prompts)
            if missing == 0:
                break
            if cancelled is not None and cancelled.is_set():
                raise CancelledError
            prompts = self._source.take(missing, after=skip + len(result.taken))
            result.taken += prompts
            with timer.phase("gen"):
                samples = self._client.generate(prompts, version, cancelled)
            with timer.phase("reward"):
                scores = self._reward.score(samples)
            for number, prompt in enumerate(prompts):
                part = slice(number * self._n, (number + 1) * self._n)
                useful = self._filter is None or np.ptp(scores[part]) > 0
                _add(result if useful else spare, prompt, samples[part], scores[part])
        for number, prompt in enumerate(spare.prompts):
            part = slice(number * self._n, (number + 1) * self._n)
            if len(result.prompts) < self._batch_size:
                _add(result, prompt, spare.samples[part], spare.scores[part])
            else:
                result.left_out += spare.samples[part]
        return result


def _add(to: RolloutBatch, prompt: Prompt, samples: list[Sample], scores: list[float]) -> None:
    to.prompts.append(prompt)
    to.samples += samples
    to.scores += scores
