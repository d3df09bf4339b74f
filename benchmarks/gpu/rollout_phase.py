"""The rollout phase of a job as its controller runs it, on one engine: prompts in, a scored batch out."""

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from time import monotonic
from typing import Any

from rollout_cases import VERSION, RolloutCase

from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.status import EngineState
from grpo_worker.controller.generation.step_sampler import StepSampler
from grpo_worker.data.prompts import Prompt, PromptSource
from grpo_worker.data.tasks import Counts, Record
from grpo_worker.data.tokenizer import TextTokenizer, load_tokenizer
from grpo_worker.metrics.timing import StepTimer
from grpo_worker.rewards.manager import open_reward
from grpo_worker.rollout.client import RolloutClient
from grpo_worker.rollout.routing import EngineEntry, EngineTable
from grpo_worker.rollout.sampling import Sample, sampling_params
from grpo_worker.weightsync.protocol.version import Version

_TOKENIZER = "preset:tiny-moe"  # has the same tiny tokenizer as all models of the benchmarks


class _Texts:
    """Task with the prompts of a case."""

    notes: list[str] = []

    def __init__(self, texts: list[str]) -> None:
        self._texts = texts
        self.counts = Counts(len(texts))

    def prompt(self, index: int, tokenizer: TextTokenizer) -> list[int]:
        return tokenizer.encode(self._texts[index])

    def record(self, index: int) -> Record:
        return Record("benchmark", self._texts[index][:8], {})


class _FixedLengths:
    """Client whose answers end after a number of tokens that the prompt determines."""

    def __init__(self, client: RolloutClient, params: dict[str, Any], case: RolloutCase) -> None:
        self._client, self._params, self._case = client, params, case

    def submit(
        self, prompt: Prompt, version: int, arrived: Callable[[Sample], None] | None = None
    ) -> Future[list[Sample]]:
        length = {"max_new_tokens": self._case.lengths[prompt.index]}
        self._client.set_sampling(self._params | length)
        return self._client.submit(prompt, version, arrived)

    def forget(self) -> None:
        self._client.forget()


class RolloutPhase:
    """The controller's part of a step up to the batch, with the job's reward.

    ``concurrency``: requests that the engine runs at once.
    """

    def __init__(self, case: RolloutCase, reward: Path, port: int, concurrency: int) -> None:
        spec = _spec(case, reward)
        self._case, self._spec = case, spec
        self._task, self._tokenizer = _Texts(case.texts()), load_tokenizer(_TOKENIZER)
        self._reward = open_reward(self._task, self._tokenizer, spec.reward)
        table = EngineTable()
        table.update(EngineEntry("engine-0", "127.0.0.1", EngineState.SERVING, VERSION))
        self._client = RolloutClient(
            table, seed=spec.seed, n=case.samples, timeout=60, max_running=concurrency, port=port
        )
        params = sampling_params(spec.algorithm, max(case.lengths), ()) | {"ignore_eos": True}
        self._fixed = _FixedLengths(self._client, params, case)

    def prompts(self) -> list[Prompt]:
        """Return the step's prompts."""
        return self._source().take(len(self._case.lengths))

    def run(self) -> dict[str, float]:
        """Generate and score a step; return its tokens, seconds and the controller's CPU seconds.

        Raises AssertionError if an answer has another length than asked for.
        """
        timer, started = StepTimer(), monotonic()
        sampler = StepSampler(self._spec, self._source(), self._fixed, self._reward)
        batch = sampler.sample(Version(VERSION), timer)
        seconds = monotonic() - started
        for sample in batch.samples:
            assert len(sample.ids) == len(sample.log_probs) == self._case.lengths[sample.prompt_index]
        tokens = sum(len(sample.ids) for sample in batch.samples)
        assert tokens == self._case.tokens and not self._client.counts.retries
        return {"tokens": tokens, "seconds": seconds, "controller_cpu_seconds": timer.cpu()}

    def close(self) -> None:
        """End the client and the reward's workers."""
        self._client.close()
        self._reward.close()

    def _source(self) -> PromptSource:
        return PromptSource(self._task, self._tokenizer, self._spec.data.prompt_length)


def _spec(case: RolloutCase, reward: Path) -> GRPOJobSpec:
    count = len(case.lengths)
    return GRPOJobSpec.model_validate(
        {
            "model": {"path": _TOKENIZER},
            "data": {
                "train": "/data/prompts.jsonl", "trainBatchSize": count, "promptLength": case.characters,
                "responseLength": max(case.lengths),
            },
            "reward": {"function": f"{reward}:compute_score"},
            "algorithm": {"samplesPerPrompt": case.samples},
            "trainer": {"nodes": 1, "gpusPerNode": 1, "miniBatchSize": count},
            "rollout": {"template": {"engine": {}}},
            "checkpoint": {"store": {"path": "/data"}},
            "totalSteps": 1,
        }
    )  # fmt: skip
