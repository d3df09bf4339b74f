"""Dynamic sampling: groups that teach nothing are replaced, nothing is lost, a replay is the same."""

from typing import Any

from grpo_worker.controller.generation.step_sampler import StepSampler
from grpo_worker.data.prompts import PromptSource
from grpo_worker.data.tasks import open_gym
from grpo_worker.data.tokenizer import load_tokenizer
from grpo_worker.metrics.timing import StepTimer
from grpo_worker.rollout.batch_file import RolloutBatch
from grpo_worker.weightsync.protocol.version import Version
from support.objects import job, spec_of
from support.rollout_fakes import WANTED, Even, N


def _source() -> PromptSource:
    tokenizer = load_tokenizer("preset:tiny-moe")
    return PromptSource(open_gym("reasoning-gym:gcd", seed=3), tokenizer, 4096)


def _sample(source: PromptSource, **algorithm: Any) -> RolloutBatch:
    spec = spec_of(job())
    spec = spec.model_copy(update={"algorithm": type(spec.algorithm).model_validate(algorithm)})
    even: Any = Even()
    return StepSampler(spec, source, even, even).sample(Version(4), StepTimer())


def test_without_a_filter_every_group_is_used() -> None:
    found = _sample(_source())
    assert [p.index for p in found.prompts] == list(range(WANTED)) and found.left_out == []
    assert len(found.samples) == len(found.scores) == WANTED * N


def test_groups_of_equal_scores_are_replaced() -> None:
    found = _sample(_source(), filterGroups={})
    assert [p.index for p in found.prompts] == [0, 2, 4, 6, 8, 10, 12, 14]
    assert {s.prompt_index % 2 for s in found.samples} == {0} and {s.version for s in found.samples} == {4}
    used = {s.prompt_index for s in (*found.samples, *found.left_out)}
    assert used == {p.index for p in found.taken}, "a sample was dropped silently"


def test_after_the_last_batch_the_step_is_filled_up() -> None:
    found = _sample(_source(), filterGroups={"maxNumGenBatches": 1})
    assert sorted(p.index for p in found.prompts) == list(range(WANTED))
    assert [p.index for p in found.prompts][:4] == [0, 2, 4, 6] and len(found.samples) == WANTED * N


def test_a_step_that_is_made_again_takes_the_same_prompts() -> None:
    source = _source()
    first = _sample(source, filterGroups={})
    assert _sample(source, filterGroups={}) == first
    source.consumed(first.taken)
    following = _sample(source, filterGroups={})
    assert min(p.index for p in following.taken) == max(p.index for p in first.taken) + 1
