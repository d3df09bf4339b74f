"""Generate and reward until a step has its groups, with or without dynamic sampling."""

import threading
from concurrent.futures import CancelledError

import numpy as np

from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_worker.data.prompts import Prompt, PromptSource
from grpo_worker.metrics.timing import StepTimer
from grpo_worker.rewards.manager import RewardManager
from grpo_worker.rollout.batch_file import Generated
from grpo_worker.rollout.client import RolloutClient
from grpo_worker.rollout.sampling import Sample


class StepSampler:
    """Prompts in, scored groups out. A replay of a step takes the same prompts in the same order."""

    def __init__(
        self, spec: GRPOJobSpec, source: PromptSource, client: RolloutClient, reward: RewardManager
    ) -> None:
        self._n = spec.algorithm.samples_per_prompt
        self._wanted = spec.data.train_batch_size
        self._filter = spec.algorithm.filter_groups
        self._source = source
        self._client = client
        self._reward = reward

    def sample(
        self,
        version: int,
        timer: StepTimer,
        skip: int = 0,
        cancelled: threading.Event | None = None,
    ) -> Generated:
        """Groups for one step, sampled at ``version``.

        ``skip``: prompts in flight that belong to the step before. ``cancelled``: give up, with
        CancelledError, when it is set.

        With filterGroups, groups of equal scores are left out and others drawn in their place, up to
        maxNumGenBatches times; what is lacking then is filled up with groups that were left out, so
        that the batch keeps its size.
        """
        result, spare = Generated(), Generated()
        rounds = self._filter.max_num_gen_batches if self._filter else 1
        for _ in range(rounds):
            lacking = self._wanted - len(result.prompts)
            if lacking == 0:
                break
            if cancelled is not None and cancelled.is_set():
                raise CancelledError
            prompts = self._source.take(lacking, after=skip + len(result.taken))
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
            if len(result.prompts) < self._wanted:
                _add(result, prompt, spare.samples[part], spare.scores[part])
            else:
                result.left_out += spare.samples[part]
        return result


def _add(to: Generated, prompt: Prompt, samples: list[Sample], scores: list[float]) -> None:
    to.prompts.append(prompt)
    to.samples += samples
    to.scores += scores
