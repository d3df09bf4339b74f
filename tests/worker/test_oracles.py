"""Advantages and losses equal verl's own, on recorded batches, to 1e-6."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from grpo_devcluster.packages import oracles
from grpo_operator.api.v1alpha1.algorithm import AlgorithmSpec
from grpo_worker.algorithms.advantages import gae, whiten
from grpo_worker.algorithms.batch_advantages import add_advantages
from grpo_worker.algorithms.losses import (
    PolicyLossConfig,
    kl_estimate,
    policy_loss,
    value_loss,
)
from grpo_worker.data.micro_batch import padded
from support.objects import job, spec_of
from support.padded import ragged, token_weights
from support.padded_reference import token_rewards

N, PROMPTS, TOKENS = 4, 6, 12
BOUND = 1e-6


@pytest.fixture(scope="module")
def verl() -> Iterator[Any]:
    """Return verl's core_algos; its packages are importable only in these tests."""
    folder = str(oracles())
    sys.path.append(folder)
    from verl.trainer.ppo import core_algos

    yield core_algos
    sys.path.remove(folder)


@pytest.fixture(params=range(5))
def batch(request: pytest.FixtureRequest) -> dict[str, torch.Tensor]:
    """Responses of different lengths, one of them empty, with all kinds of ratios."""
    generator = torch.Generator().manual_seed(request.param)
    rows = N * PROMPTS
    lengths = torch.randint(1, TOKENS + 1, (rows, 1), generator=generator)
    lengths[3] = 0
    mask = (torch.arange(TOKENS) < lengths).float()
    old = -3 * torch.rand(rows, TOKENS, generator=generator)
    log_prob = old + 0.5 * torch.randn(rows, TOKENS, generator=generator)
    reference = old + 0.3 * torch.randn(rows, TOKENS, generator=generator)
    scores = torch.rand(rows, generator=generator).round(decimals=1)
    advantages = torch.randn(rows, 1, generator=generator).expand(rows, TOKENS) * mask
    return {"mask": mask, "old": old, "log_prob": log_prob, "reference": reference, "scores": scores,
            "advantages": advantages}  # fmt: skip


def _close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert (ours.double() - theirs.double()).abs().max().item() < BOUND


@pytest.mark.parametrize("by_std", [True, False], ids=["grpo", "dr_grpo"])
def test_grpo(verl: Any, batch: dict[str, torch.Tensor], by_std: bool) -> None:
    spec = AlgorithmSpec(samples_per_prompt=N, norm_adv_by_std=by_std)
    rewards, index = token_rewards(batch["scores"], batch["mask"]), np.repeat(np.arange(PROMPTS), N)
    theirs, _ = verl.compute_grpo_outcome_advantage(
        rewards.clone(), batch["mask"], index, norm_adv_by_std_in_grpo=by_std
    )
    _close(_advantages(batch, spec), theirs)


def _advantages(batch: dict[str, torch.Tensor], spec: AlgorithmSpec) -> torch.Tensor:
    """Return our advantages of responses without prompts, [rows, tokens]."""
    seen = batch["mask"].bool()
    rows = ragged({"input_ids": torch.zeros(seen.shape, dtype=torch.long), "attention_mask": seen})
    rows = replace(rows, width=TOKENS)
    whole = spec_of(job()).model_copy(update={"algorithm": spec})
    found, _ = add_advantages(rows, batch["scores"].tolist(), whole, 0.0)
    return padded(found, range(found.rows))["advantages"]


@pytest.mark.parametrize("kind", ["rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_other_estimators(verl: Any, batch: dict[str, torch.Tensor], kind: str) -> None:
    from verl.trainer.config import AlgoConfig

    spec = AlgorithmSpec(samples_per_prompt=N, adv_estimator=kind, gamma=0.9)
    rewards, index = token_rewards(batch["scores"], batch["mask"]), np.repeat(np.arange(PROMPTS), N)
    function = verl.get_adv_estimator_fn(kind)
    theirs, _ = function(
        token_level_rewards=rewards.clone(), response_mask=batch["mask"].double(), index=index,
        config=AlgoConfig(gamma=0.9),
    )  # fmt: skip
    _close(_advantages(batch, spec), theirs)


@pytest.mark.parametrize("lam", [1.0, 0.95])
def test_gae_and_the_value_loss(verl: Any, batch: dict[str, torch.Tensor], lam: float) -> None:
    mask, values = batch["mask"], batch["old"] * 0.3
    rewards = token_rewards(batch["scores"], mask)
    raw = gae(rewards, values.double(), mask.double(), 0.99, lam)
    advantages, returns = torch.zeros_like(raw), (raw + values) * mask
    advantages[mask.bool()] = whiten(raw[mask.bool()])
    theirs = verl.compute_gae_advantage_return(rewards, values.double(), mask.double(), 0.99, lam)
    _close(advantages, theirs[0] * mask)
    _close(returns * mask, theirs[1] * mask)
    now = (values + 0.4 * batch["log_prob"]).double()
    expected, _ = verl.compute_value_loss(
        now, returns.double(), values.double(), mask.double(), 0.2, "token-mean"
    )
    tokens, _ = value_loss(now, values.double(), returns.double(), 0.2)
    _close((token_weights(mask, "token-mean", TOKENS) * tokens).sum(), expected)


MODES = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["vanilla", "gspo"])
def test_policy_losses(verl: Any, batch: dict[str, torch.Tensor], kind: str, mode: str) -> None:
    """The loss and its gradient, with clip-higher, dual clip and importance weights."""
    from verl.workers.config import ActorConfig

    theirs_config = ActorConfig(
        strategy="fsdp", clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=3.0,
        ppo_micro_batch_size_per_gpu=1, rollout_n=1,
    )  # fmt: skip
    ours_config = PolicyLossConfig(0.2, 0.28, 3.0, policy_loss=kind)
    weights = torch.rand(batch["mask"].shape, generator=torch.Generator().manual_seed(9)) * 2
    theirs_in = batch["log_prob"].double().requires_grad_()
    theirs, _ = verl.get_policy_loss_fn(kind)(
        batch["old"].double(), theirs_in, batch["advantages"].double(), batch["mask"].double(), mode,
        theirs_config, weights.double(),
    )  # fmt: skip
    torch.autograd.backward(theirs)
    ours_in = batch["log_prob"].double().requires_grad_()
    tokens, _ = policy_loss(ours_in, batch["old"], batch["advantages"], batch["mask"], ours_config)
    ours = (token_weights(batch["mask"], mode, TOKENS) * weights * tokens).sum()
    torch.autograd.backward(ours)
    _close(ours.detach(), theirs.detach())
    assert ours_in.grad is not None and theirs_in.grad is not None
    _close(ours_in.grad, theirs_in.grad)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_estimates(verl: Any, batch: dict[str, torch.Tensor], kind: str) -> None:
    far = batch["reference"] * 12  # far enough for the bounds
    for reference in (batch["reference"], far):
        theirs = verl.kl_penalty_forward(batch["log_prob"].double(), reference.double(), kind)
        _close(kl_estimate(batch["log_prob"].double(), reference.double(), kind), theirs)
