"""The expected time of a step: lengths, generation, phases."""

import dataclasses

import pytest

from grpo_operator.api.catalog.architectures import architecture
from grpo_operator.api.catalog.gpus import GPUS, GpuType
from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.plan.planner.engines.shape import EngineShape
from grpo_operator.plan.planner.model.shape import ModelShape
from grpo_operator.plan.planner.step.cost import RolloutHardware, StepModel, TrainingHardware, Transfer
from grpo_operator.plan.planner.step.decode import Engine
from grpo_operator.plan.planner.step.generation import generation
from grpo_operator.plan.planner.step.lengths import ResponseLengths
from grpo_operator.plan.planner.step.workload import StepWorkload

H100 = GPUS[GpuType.H100]
V3 = ModelShape.from_hf(architecture("deepseek-v3"))
LENGTHS = ResponseLengths(4096, 14336)
ENGINE = Engine(V3, EngineShape(32, 32, 32, fp8=True, all_to_all=True), H100, 8)
WORK = StepWorkload(512, 16, 128, 512, LENGTHS, max_tokens=16384)
LAYOUT = Layout(256, 4, 16, 1, 16, layers_in_first_stage=4, layers_in_last_stage=1)
FLAGSHIP = StepModel(
    V3,
    WORK,
    TrainingHardware(H100, 8, LAYOUT),
    RolloutHardware(H100, 8, 8, ENGINE.shape, 32),
    Transfer(10e12, 16 * 50e9, 90_000, 600e9, 40e9, 20),
)


@pytest.mark.parametrize("sigma", [0.0, 0.8, 1.5])
def test_lengths_have_the_mean_and_never_exceed_the_longest(sigma: float) -> None:
    lengths = ResponseLengths(4096, 14336, sigma).sample(1000)
    assert sum(lengths) / 1000 == pytest.approx(4096, rel=1e-6)
    assert max(lengths) <= 14336 and lengths == sorted(lengths)
    assert (len(set(lengths)) == 1) == (sigma == 0)


def test_an_impossible_mean_is_refused_with_the_limit() -> None:
    with pytest.raises(ValueError, match=r"a mean response of 20000 tokens is impossible with .*14336"):
        ResponseLengths(20000, 14336)


def test_equal_lengths_are_generated_in_whole_waves() -> None:
    equal = ResponseLengths(1000, 1000, 0.0)
    once = generation(ENGINE, equal, 100, samples=8, room=8)
    twice = generation(ENGINE, equal, 100, samples=16, room=8)
    assert once.decode == 0 and once.tail == pytest.approx(1000 * ENGINE.decode_seconds(8, 600), rel=1e-9)
    assert twice.decode == pytest.approx(once.tail) and twice.tail == pytest.approx(once.tail)


def test_a_long_tail_costs_time_in_which_few_sequences_run() -> None:
    def seconds(sigma: float) -> float:
        return generation(ENGINE, ResponseLengths(2000, 14336, sigma), 100, samples=32, room=32).total

    assert seconds(0.0) < seconds(0.5) < seconds(1.0)


def test_more_room_never_slows_generation_and_no_room_is_refused() -> None:
    found = [generation(ENGINE, LENGTHS, 512, samples=64, room=room).total for room in (1, 4, 16, 64)]
    assert found == sorted(found, reverse=True)
    with pytest.raises(ValueError, match="no sequence fits in the KV cache"):
        generation(ENGINE, LENGTHS, 512, samples=8, room=0)


def test_a_step_is_the_sum_of_its_phases_or_overlaps() -> None:
    step = FLAGSHIP.step()
    assert step.total == pytest.approx(sum(step.phases().values()))
    assert set(step.phases()) == {
        "gen", "old_log_prob", "ref", "update_actor", "update_weights", "save_checkpoint",
    }  # fmt: skip
    ahead = dataclasses.replace(FLAGSHIP, workload=dataclasses.replace(WORK, ahead=True)).step()
    assert step.total - ahead.total == pytest.approx(min(step.gen, step.training))
    assert step.gpus == 512 and step.gpu_hours == pytest.approx(step.total * 512 / 3600)


def test_other_models_and_padding_cost_what_they_compute() -> None:
    step = FLAGSHIP.step()
    alone = dataclasses.replace(WORK, reference=False)
    assert dataclasses.replace(FLAGSHIP, workload=alone).step().ref == 0
    critic = dataclasses.replace(WORK, critic=True)
    assert dataclasses.replace(FLAGSHIP, workload=critic).step().update_critic == step.update_actor
    padded = dataclasses.replace(WORK, max_tokens=None)
    assert dataclasses.replace(FLAGSHIP, workload=padded).step().ref > 2 * step.ref


PADDED = dataclasses.replace(WORK, max_tokens=None)


@pytest.mark.parametrize(
    ("work", "larger"),
    [
        (WORK, dataclasses.replace(WORK, log_prob_max_tokens=32768)),
        (PADDED, dataclasses.replace(PADDED, log_prob_micro_batch=2)),
    ],
    ids=["packed", "padded"],
)
def test_larger_passes_without_gradients_are_fewer(work: StepWorkload, larger: StepWorkload) -> None:
    samples, replicas = work.samples, LAYOUT.data
    before, after = (plan.rows(samples, replicas, gradients=False) for plan in (work, larger))
    assert after.count == pytest.approx(before.count / 2) and after.tokens == pytest.approx(2 * before.tokens)
    assert larger.rows(samples, replicas, gradients=True) == work.rows(samples, replicas, gradients=True)
    plain, fewer = (dataclasses.replace(FLAGSHIP, workload=plan) for plan in (work, larger))
    assert fewer.update() == plain.update()
    assert fewer.forward().launch < 0.6 * plain.forward().launch, "packed sequences start one by one"
    assert fewer.forward().compute == pytest.approx(plain.forward().compute)


def test_optimizer_steps_share_the_samples_and_repeat_the_bubble() -> None:
    one = dataclasses.replace(FLAGSHIP, workload=dataclasses.replace(WORK, mini_batch=512)).step()
    four = FLAGSHIP.step()
    assert 1 < four.update_actor / one.update_actor < 1.5 and four.bubbles > one.bubbles
