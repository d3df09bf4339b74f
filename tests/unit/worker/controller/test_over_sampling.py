"""Over-sampling: slow groups are left to the next step, none is lost, and lengths are not favoured."""

import threading
from concurrent.futures import Future
from typing import Any

import pytest

from grpo_worker.controller.generation.step_sampler import StepSampler
from grpo_worker.data.prompts import Prompt, PromptSource
from grpo_worker.data.tasks import open_gym
from grpo_worker.data.tokenizer import load_tokenizer
from grpo_worker.metrics.timing import StepTimer
from grpo_worker.rollout.batch_file import RolloutBatch
from grpo_worker.rollout.sampling import Sample
from grpo_worker.weightsync.protocol.version import Version
from support.objects import job, spec_of
from support.rollout_fakes import WANTED, N, Scorer

STEPS = 6


class Slow(Scorer):
    """Engines on which every third prompt takes one step longer than the others."""

    def __init__(self) -> None:
        self.submitted: list[int] = []
        self.timers: list[threading.Timer] = []

    def submit(self, prompt: Prompt, version: int, arrived: Any = None) -> "Future[list[Sample]]":
        self.submitted.append(prompt.index)
        group: Future[list[Sample]] = Future()
        if prompt.index % 3 == 0:
            timer = threading.Timer(0.5, self._end, (prompt, version, group))
            self.timers.append(timer)
            timer.start()
        else:
            self._end(prompt, version, group)
        return group

    def _end(self, prompt: Prompt, version: int, group: "Future[list[Sample]]") -> None:
        if group.set_running_or_notify_cancel():
            ids = (5,) * (20 if prompt.index % 3 == 0 else 2)
            group.set_result(
                [Sample(prompt.index, k, ids, (-0.1,) * len(ids), version, "e") for k in range(N)]
            )

    def score(self, samples: list[Sample]) -> list[float]:
        return [float(s.number == 0) for s in samples]


def _steps(partial: bool, engines: Any) -> tuple[list[RolloutBatch], StepSampler]:
    staleness = {"maxVersionLag": int(partial), "partialRollouts": partial}
    spec = spec_of(job(staleness=staleness))
    spec = spec.model_copy(update={"rollout": spec.rollout.model_copy(update={"over_sample_rate": 0.5})})
    source = PromptSource(open_gym("reasoning-gym:gcd", seed=3), load_tokenizer("preset:tiny-moe"), 4096)
    sampler = StepSampler(spec, source, engines, engines)
    found = []
    for step in range(STEPS):
        found.append(sampler.sample(Version(step), StepTimer()))
        source.consumed(found[-1].taken)
    return found, sampler


@pytest.mark.parametrize("partial", [False, True], ids=["again", "continued"])
def test_each_prompt_is_trained_on_once_and_at_most_a_step_later(partial: bool) -> None:
    engines = Slow()
    found, sampler = _steps(partial, engines)
    sampler.forget()
    used = [p.index for batch in found for p in batch.prompts]
    assert len(used) == len(set(used)) == STEPS * WANTED
    assert set(used) >= set(range((STEPS - 1) * WANTED)), "a slow prompt is missing"
    assert sum(batch.cut for batch in found) > 0
    long = sum(index % 3 == 0 for index in used) / len(used)
    assert abs(long - 1 / 3) < 0.1, "lengths are favoured"
    if partial:
        assert len(engines.submitted) == len(set(engines.submitted)), "a cut group goes on"
    else:
        assert all(s.version == step for step, batch in enumerate(found) for s in batch.samples)
    for timer in engines.timers:
        timer.cancel()


class Away(Scorer):
    """Engines that are away after some groups; the last group that was started is still generated."""

    def __init__(self, answered: int) -> None:
        self.left = answered
        self.submitted: list[int] = []
        self.running: list[tuple[Prompt, int, Future[list[Sample]]]] = []

    def submit(self, prompt: Prompt, version: int, arrived: Any = None) -> "Future[list[Sample]]":
        self.submitted.append(prompt.index)
        group: Future[list[Sample]] = Future()
        if self.left > 0:
            group.set_result([Sample(prompt.index, k, (5,), (-0.1,), version, "e") for k in range(N)])
        elif self.left == 0:
            self.running.append((prompt, version, group))
        else:
            group.set_exception(TimeoutError("no engine serves version 0"))
        self.left -= 1
        return group

    def score(self, samples: list[Sample]) -> list[float]:
        return [float(s.number == 0) for s in samples]


@pytest.mark.parametrize("restarted", [False, True])
def test_what_was_generated_is_kept_while_engines_are_away(restarted: bool) -> None:
    engines: Any = Away(answered=5)
    source = PromptSource(open_gym("reasoning-gym:gcd", seed=3), load_tokenizer("preset:tiny-moe"), 4096)
    sampler = StepSampler(spec_of(job()), source, engines, engines)
    state = source.state_dict()
    with pytest.raises(TimeoutError, match="no engine serves"):
        sampler.sample(Version(0), StepTimer())
    assert engines.submitted == list(range(WANTED))
    ((prompt, version, group),) = engines.running
    if restarted:
        source.load_state_dict(state)
        sampler.forget()
        assert group.cancelled()
    else:
        group.set_result([Sample(prompt.index, k, (5,), (-0.1,), version, "e") for k in range(N)])
    engines.left = 100
    batch = sampler.sample(Version(0), StepTimer())
    assert [p.index for p in batch.prompts] == list(range(WANTED))
    assert engines.submitted[WANTED:] == list(range(0 if restarted else 6, WANTED))
