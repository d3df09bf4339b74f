"""The learning rate over the optimizer steps of a job."""

import pytest
import torch

from grpo_operator.api.v1alpha1.optimizer import OptimizerSpec
from grpo_worker.megatron.optim.optimizer import schedule_of
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
