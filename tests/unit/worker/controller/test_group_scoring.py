"""Groups on their way through the reward: a slow one holds up nothing but itself."""

import threading
from concurrent.futures import CancelledError, Future
from typing import Any

import pytest

from grpo_worker.controller.generation.group_scoring import GroupScoring
from grpo_worker.controller.generation.step_sampler import StepSampler
from grpo_worker.data.prompts import Prompt, PromptSource
from grpo_worker.data.tasks import open_gym
from grpo_worker.data.tokenizer import load_tokenizer
from grpo_worker.metrics.timing import StepTimer
from grpo_worker.rollout.sampling import PromptRefusedError, Sample
from grpo_worker.weightsync.protocol.version import Version
from support.objects import job, spec_of
from support.rollout_fakes import WANTED, Even, N


class Slow(Even):
    """The reward of prompt 0 is late: it arrives after all that can be done without it."""

    def __init__(self) -> None:
        self.submitted: list[int] = []
        self.late: Future[list[float]] = Future()

    def submit(self, prompt: Prompt, version: int) -> "Future[list[Sample]]":
        self.submitted.append(prompt.index)
        return super().submit(prompt, version)

    def start(self, samples: list[Sample]) -> "Future[list[float]]":
        if samples[0].prompt_index == 0:
            return self.late
        if samples[0].prompt_index == 14:  # the last one of the batch
            threading.Timer(0.3, lambda: self.late.set_result([1.0] + [0.0] * (N - 1))).start()
        return super().start(samples)


def test_a_slow_reward_holds_up_no_other_group() -> None:
    """Useless groups are replaced, and the replacements generated and judged, while one is still judged."""
    spec = spec_of(job())
    algorithm = type(spec.algorithm).model_validate({"filterGroups": {}})
    engines: Any = Slow()
    source = PromptSource(open_gym("reasoning-gym:gcd", seed=3), load_tokenizer("preset:tiny-moe"), 4096)
    sampler = StepSampler(spec.model_copy(update={"algorithm": algorithm}), source, engines, engines)
    timer = StepTimer()
    found = sampler.sample(Version(4), timer)
    assert [p.index for p in found.prompts] == list(range(0, 2 * WANTED, 2))
    assert engines.submitted == list(range(2 * WANTED - 1)), "started while prompt 0 was judged"
    assert found.scores[:2] == [1.0, 0.0] and timer.seconds["timing_s/reward"] > 0.1


def _prompt(index: int) -> Prompt:
    return Prompt(index, (1, 2))


def test_results_come_in_the_order_of_the_prompts() -> None:
    engines: Any = Even()
    scoring = GroupScoring(engines)
    refused: Future[list[Sample]] = Future()
    refused.set_exception(PromptRefusedError(_prompt(1), "too long"))
    for prompt, group in ((_prompt(2), None), (_prompt(1), refused), (_prompt(0), None)):
        scoring.add(prompt, group or engines.submit(prompt, 0))
    first = scoring.wait(None)
    assert [type(item) for item in first] == [PromptRefusedError] and not scoring.generating
    assert [item[0].index for item in scoring.wait(None) if isinstance(item, tuple)] == [0, 2]


def test_a_cancelled_wait_cancels_what_is_not_judged() -> None:
    engines: Any = Slow()
    scoring, cancelled = GroupScoring(engines), threading.Event()
    scoring.add(_prompt(0), engines.submit(_prompt(0), 0))
    assert scoring.wait(cancelled) == []
    cancelled.set()
    with pytest.raises(CancelledError):
        scoring.wait(cancelled)
    scoring.cancel()
    assert engines.late.cancelled()
