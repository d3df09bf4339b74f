"""The learning rate over the optimizer steps of a job."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from grpo_operator.api.v1alpha1.optimizer import OptimizerSpec
from grpo_worker.megatron.optim.optimizer import Trainable, schedule_of
from grpo_worker.roles.dispatch import Dispatch, dispatch_mode
from grpo_worker.roles.trainer import TrainerWorker
from support.objects import job, spec_of


@pytest.mark.parametrize("style", ["linear", "cosine"])
def test_the_learning_rate_decays_until_the_last_update_of_the_job(style: str) -> None:
    manifest = job()
    manifest["spec"]["totalSteps"] = 10
    manifest["spec"]["data"]["trainBatchSize"] = 4 * manifest["spec"]["trainer"]["miniBatchSize"]
    spec = spec_of(manifest)
    assert spec.updates == 40
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = schedule_of(optimizer, OptimizerSpec(lr=1e-3, min_lr=1e-5, lr_decay_style=style), spec.updates)
    rates = []
    for _ in range(spec.updates):
        schedule.step(1)
        rates.append(float(optimizer.param_groups[0]["lr"]))
    assert rates == sorted(rates, reverse=True) and rates[-1] == pytest.approx(1e-5)
    assert rates[spec.updates // 2 - 1] == pytest.approx((1e-3 + 1e-5) / 2), "halfway"


@pytest.mark.parametrize("style", ["constant", "linear", "cosine"])
def test_a_schedule_that_is_prolonged_goes_on_as_if_it_had_always_been_so_long(style: str) -> None:
    fields = OptimizerSpec(lr=1e-3, min_lr=1e-5, lr_warmup_steps=3, lr_decay_style=style)

    def begin(updates: int) -> Any:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        return SimpleNamespace(schedule=schedule_of(optimizer, fields, updates), optimizer=optimizer)

    short, long = begin(10), begin(20)
    for each in (short, long):
        each.schedule.step(8)
    Trainable.decay_over(cast(Trainable, short), 20)
    for _ in range(12):
        assert short.optimizer.param_groups[0]["lr"] == long.optimizer.param_groups[0]["lr"]
        for each in (short, long):
            each.schedule.step(1)
    assert short.schedule.state_dict() == long.schedule.state_dict()


@pytest.mark.parametrize("critic", [False, True])
def test_ranks_prolong_the_schedules_of_all_trained_models(critic: bool) -> None:
    lengths: list[tuple[str, int]] = []

    def model(name: str) -> Any:
        return SimpleNamespace(
            trainable=SimpleNamespace(decay_over=lambda updates: lengths.append((name, updates)))
        )

    rank = TrainerWorker()
    models = SimpleNamespace(policy=model("policy"), critic=model("critic") if critic else None)
    rank._models = cast(Any, models)
    rank.decay_over(40)
    assert lengths == [("policy", 40), ("critic", 40)][: 1 + critic]
    assert dispatch_mode(TrainerWorker.decay_over) is Dispatch.ONE_TO_ALL
