"""Advantages, losses, KL controllers, seeded sampling: compared with formulas written out here."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from grpo_operator.api.v1alpha1.algorithm import AlgorithmSpec, KlControl, OverlongSpec
from grpo_worker.algorithms.advantages import discounted_returns, group_advantages
from grpo_worker.algorithms.batch_advantages import add_advantages
from grpo_worker.algorithms.kl import KlController
from grpo_worker.algorithms.losses import (
    PolicyLossConfig,
    clipped_policy_loss,
    kl_estimate,
    policy_loss,
    rollout_weights,
    row_weights,
)
from grpo_worker.algorithms.rewards import overlong_penalty
from grpo_worker.common.ragged_batch import RaggedBatch
from grpo_worker.rollout.sampling import sampling_seed
from grpo_worker.rollout.sglang.cpu_plugin import gumbel_max
from support.objects import job, spec_of


def _advantages(scores: np.ndarray, **config: Any) -> np.ndarray:
    """Return advantages [prompts, n] of samples of one token each."""
    spec = AlgorithmSpec(samples_per_prompt=scores.shape[1], **config)
    found: np.ndarray = group_advantages(torch.tensor(scores).flatten(), spec).numpy().reshape(scores.shape)
    return found


@given(arrays(np.float64, (5, 4), elements=st.floats(0, 1)))
def test_group_advantages_have_mean_zero_and_keep_the_order(scores: np.ndarray) -> None:
    advantages = _advantages(scores)
    assert np.allclose(advantages.mean(1), 0, atol=1e-6)
    assert (np.argmax(advantages, 1) == np.argmax(scores, 1)).all() or np.ptp(scores, 1).min() < 1e-6


def test_group_advantages_of_a_known_group() -> None:
    assert _advantages(np.array([[1.0, 0.0, 0.0, 0.0]]))[0, 0] == pytest.approx(0.75 / 0.5, rel=1e-5)
    assert _advantages(np.array([[1.0, 0.0]]), norm_adv_by_std=False).tolist() == [[0.5, -0.5]]
    assert _advantages(np.array([[1.0, 0.0, 0.5]]), adv_estimator="rloo").tolist() == [[0.75, -0.75, 0.0]]
    with pytest.raises(ValueError, match="do not form groups of n = 2"):
        group_advantages(torch.ones(3), AlgorithmSpec(samples_per_prompt=2))


def test_discounted_returns_reach_back_over_masked_tokens() -> None:
    rewards = torch.tensor([[0.0, 0.0, 1.0, 0.0]])
    mask = torch.tensor([[1.0, 0.0, 1.0, 0.0]])
    assert discounted_returns(rewards, mask, 0.5).tolist() == [[0.5, 0.0, 1.0, 0.0]]


def test_overlong_answers_lose_reward_gradually() -> None:
    spec = OverlongSpec(buffer_length=4, penalty=0.5)
    found = overlong_penalty(torch.tensor([1, 6, 7, 8, 10]), 10, spec)
    assert found.tolist() == [0, 0, -0.125, -0.25, -0.5]


def test_gspo_ratios_are_geometric_means_with_token_gradients() -> None:
    config = PolicyLossConfig(policy_loss="gspo", clip_ratio_low=0.9, clip_ratio_high=9)
    new = torch.tensor([[0.2, 0.4, 5.0]], requires_grad=True)
    mask, advantages = torch.tensor([[1.0, 1.0, 0.0]]), torch.tensor([[1.0, 1.0, 0.0]])
    loss, _ = policy_loss(new, torch.zeros(1, 3), advantages, mask, config)
    assert loss[0, :2].tolist() == pytest.approx([-math.exp(0.3)] * 2)
    torch.autograd.backward(loss.sum())
    assert new.grad is not None and new.grad[0, :2].tolist() == pytest.approx([-math.exp(0.3)] * 2)


def test_importance_weights_are_truncated() -> None:
    found = rollout_weights(torch.tensor([0.0, 0.0]), torch.tensor([math.log(2), -math.log(9)]), cap=2.0)
    assert found.tolist() == pytest.approx([0.5, 2.0])


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.0, 2.0, -2.0, False),
        (1.5, 1.0, -1.28, True),  # too good to be trusted: clipped above
        (0.5, 1.0, -0.5, False),
        (0.5, -1.0, 0.8, True),  # already unlikely: clipped below
        (1.5, -1.0, 1.5, False),
        (9.0, -1.0, 3.0, False),  # dual clip
    ],
)
def test_clipped_loss(ratio: float, advantage: float, loss: float, clipped: bool) -> None:
    config = PolicyLossConfig(clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=3.0)
    new = torch.tensor([[math.log(ratio)]])
    value, active = clipped_policy_loss(new, torch.zeros(1, 1), torch.tensor([[advantage]]), config)
    assert value.item() == pytest.approx(loss, rel=1e-6)
    assert bool(active.item()) == clipped


def test_kl_estimates() -> None:
    new, reference = torch.tensor([-1.0]), torch.tensor([-1.5])
    assert kl_estimate(new, reference, "k1").item() == pytest.approx(0.5)
    assert kl_estimate(new, reference, "k2").item() == pytest.approx(0.125)
    assert kl_estimate(new, reference, "k3").item() == pytest.approx(math.exp(-0.5) - 0.5)
    with pytest.raises(ValueError, match="k4"):
        kl_estimate(new, reference, "k4")


def test_token_weights_match_their_loss_aggregation() -> None:
    lengths = torch.tensor([1, 3, 0])
    first = {
        "token-mean": (0.25, 1.0),
        "seq-mean-token-mean": (0.5, 1.0),
        "seq-mean-token-sum": (0.5, 2.0),
        "seq-mean-token-sum-norm": (0.125, 0.5),
    }
    for mode, (one, total) in first.items():
        found = row_weights(lengths, mode, response_length=4)
        assert found[0].item() == pytest.approx(one)
        assert (found * lengths).sum().item() == pytest.approx(total)
    with pytest.raises(ValueError, match="seq-max"):
        row_weights(lengths, "seq-max", 4)


def test_kl_controllers_and_their_state() -> None:
    fixed = KlController(KlControl(kl_coef=0.01))
    fixed.update(5.0, 100)
    assert fixed.value == 0.01
    adaptive = KlController(KlControl(type="adaptive", kl_coef=0.01, target_kl=0.1, horizon=1000))
    adaptive.update(1.0, 100)
    assert adaptive.value == pytest.approx(0.01 * (1 + 0.2 * 100 / 1000))
    copy = KlController(KlControl(type="adaptive", kl_coef=0.01))
    copy.load_state_dict(adaptive.state_dict())
    assert copy.value == adaptive.value


def test_seeded_sampling_is_reproducible_and_follows_the_distribution() -> None:
    rows = 20000
    logprobs = torch.log(torch.tensor([[0.5, 0.3, 0.2]])).expand(rows, 3)
    seeds, positions = torch.arange(rows), torch.full((rows,), 7)
    drawn = gumbel_max(logprobs, seeds, positions)
    assert torch.equal(drawn[5:6], gumbel_max(logprobs[:1], seeds[5:6], positions[:1]))
    share = torch.bincount(drawn.flatten(), minlength=3) / rows
    assert torch.allclose(share, torch.tensor([0.5, 0.3, 0.2]), atol=0.015)  # > 4 sigma


def test_sampling_seeds_are_stable_and_distinct() -> None:
    assert sampling_seed(1, 2, 3) == 1999405691  # a changed seed would change every run
    seeds = {sampling_seed(1, i, k) for i in range(50) for k in range(16)}
    assert len(seeds) == 800 and all(0 <= s < 2**31 for s in seeds)


def test_advantages_use_every_part_of_the_spec() -> None:
    zeros = np.zeros(3, np.float32)
    columns = {"old_log_probs": zeros, "ref_log_prob": zeros - 1, "rollout_log_probs": zeros - 9}
    prompts, lengths = np.array([1, 1], np.int32), np.array([3, 2], np.int32)
    algorithm = {
        "samplesPerPrompt": 2, "normAdvByStd": False, "useKlInReward": True, "klLossType": "k1",
        "overlong": {"bufferLength": 2, "penalty": 1.0}, "rolloutCorrection": {"tisCap": 2.0},
    }  # fmt: skip
    spec = spec_of(job(algorithm=algorithm))
    assert spec.data.response_length == 4
    batch, metrics = add_advantages(
        RaggedBatch(prompts, lengths, 3, response=columns), [1.0, 0.0], spec, kl_coef=0.5
    )
    # Rewards 1 - 0.5 * 2 = 0 (two tokens of KL 1) and 0 - 0.5 = -0.5: centred 0.25 and -0.25.
    assert batch.row["advantages"].tolist() == [0.25, -0.25]
    assert batch.response["rollout_is_weights"].tolist() == [2, 2, 2]
    assert metrics["actor/reward_kl_penalty"] == 1 and metrics["critic/rewards/mean"] == -0.25
