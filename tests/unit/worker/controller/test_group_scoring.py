"""Groups on their way through the reward: a slow one holds up nothing but itself."""

import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any

import pytest

from grpo_worker.controller.generation.group import Group
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

    def submit(self, prompt: Prompt, version: int, arrived: Any = None) -> "Future[list[Sample]]":
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


def _group(index: int, engines: Any) -> Group:
    return Group(_prompt(index), 0, engines, engines)


def test_results_come_in_the_order_of_the_prompts() -> None:
    engines: Any = Even()
    scoring = GroupScoring()
    refused = _group(1, engines)
    refused.samples = Future()
    refused.samples.set_exception(PromptRefusedError(_prompt(1), "too long"))
    for group in (_group(2, engines), refused, _group(0, engines)):
        scoring.add(group)
    first = scoring.wait(None)
    assert [type(item) for item in first] == [PromptRefusedError] and not scoring.generating
    assert [item[0].index for item in scoring.wait(None) if isinstance(item, tuple)] == [0, 2]


def test_a_cancelled_wait_cancels_what_is_not_judged() -> None:
    engines: Any = Slow()
    scoring, cancelled = GroupScoring(), threading.Event()
    group = _group(0, engines)
    scoring.add(group)
    assert scoring.wait(cancelled) == []
    cancelled.set()
    with pytest.raises(CancelledError):
        scoring.wait(cancelled)
    scoring.cancel()
    assert engines.late.cancelled()


class OneByOne:
    """Engines whose last answer to each prompt waits for the reward of the first, and a reward of answers."""

    needs_groups = False

    def __init__(self, failures: int = 0) -> None:
        self.threads = ThreadPoolExecutor(2 * WANTED)
        self.judges = ThreadPoolExecutor(4)
        self.first = [threading.Event() for _ in range(WANTED)]
        self.calls: list[tuple[int, ...]] = []
        self.failures = failures

    def submit(self, prompt: Prompt, version: int, arrived: Any = None) -> "Future[list[Sample]]":
        return self.threads.submit(self._generate, prompt, version, arrived)

    def _generate(self, prompt: Prompt, version: int, arrived: Any) -> list[Sample]:
        samples = [Sample(prompt.index, k, (5,), (-0.1,), version, "e") for k in range(N)]
        for sample in [samples[1], samples[0], *samples[2:]]:  # in another order than that of the result
            if sample.number == N - 1:
                assert self.first[prompt.index].wait(10), "the first answer is not judged"
            arrived(sample)
        return samples

    def start(self, samples: Sequence[Sample]) -> "Future[list[float]]":
        return self.judges.submit(self._score, list(samples))

    def _score(self, samples: list[Sample]) -> list[float]:
        (sample,) = samples
        self.calls.append((sample.prompt_index, sample.number))
        if self.failures and sample.number == 3:
            self.failures -= 1
            raise ConnectionError("the server is away")
        if sample.number == 0:
            self.first[sample.prompt_index].set()
        return [100.0 * sample.prompt_index + sample.number]


def _step_sampler(engines: Any) -> StepSampler:
    source = PromptSource(open_gym("reasoning-gym:gcd", seed=3), load_tokenizer("preset:tiny-moe"), 4096)
    return StepSampler(spec_of(job()), source, engines, engines)


def test_the_first_answer_is_judged_while_the_last_one_is_generated() -> None:
    engines = OneByOne()
    found = _step_sampler(engines).sample(Version(0), StepTimer())
    expected = [(p, k) for p in range(WANTED) for k in range(N)]
    assert found.scores == [100.0 * p + k for p, k in expected]
    assert [(s.prompt_index, s.number) for s in found.samples] == expected
    assert sorted(engines.calls) == expected, "each answer is judged once"


def test_after_a_failure_only_answers_without_a_reward_are_judged_again() -> None:
    engines = OneByOne(failures=1)
    sampler = _step_sampler(engines)
    with pytest.raises(ConnectionError, match="the server is away"):
        sampler.sample(Version(0), StepTimer())
    found = sampler.sample(Version(0), StepTimer())
    assert found.scores == [100.0 * p + k for p in range(WANTED) for k in range(N)]
    again = [call for call, times in Counter(engines.calls).items() if times > 1]
    assert len(again) == 1 and again[0][1] == 3


def test_a_reward_that_needs_groups_gets_them_whole() -> None:
    engines: Any = Even()
    calls: list[list[int]] = []

    def start(samples: list[Sample]) -> "Future[list[float]]":
        calls.append([sample.number for sample in samples])
        return Even.start(engines, samples)

    engines.start = start
    _step_sampler(engines).sample(Version(0), StepTimer())
    assert calls == [list(range(N))] * WANTED


def test_a_cancelled_group_is_not_judged() -> None:
    engines: Any = OneByOne()
    waiting: Future[list[float]] = Future()
    engines.start = lambda _: waiting
    group = Group(_prompt(0), 0, engines, engines)
    while not group.judged:
        time.sleep(0.01)
    group.cancel()
    engines.first[0].set()
    assert waiting.cancelled()
