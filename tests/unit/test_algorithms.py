"""Advantages, losses, KL controllers, seeded sampling: against formulas written out here."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from grpo_operator.api.algorithm import KlControl
from grpo_worker.algorithms.advantages import group_normalised
from grpo_worker.algorithms.kl import KlController
from grpo_worker.algorithms.losses import (
    PolicyLossConfig,
    clipped_policy_loss,
    kl_estimate,
    token_weights,
)
from grpo_worker.rollout.sampling import sampling_seed
from grpo_worker.rollout.sglang_cpu_plugin import gumbel_max


@given(arrays(np.float64, (5, 4), elements=st.floats(0, 1)))
def test_group_advantages_have_mean_zero_and_keep_the_order(scores: np.ndarray) -> None:
    advantages = group_normalised(scores)
    assert np.allclose(advantages.mean(1), 0, atol=1e-9)
    assert (np.argmax(advantages, 1) == np.argmax(scores, 1)).all() or np.ptp(scores, 1).min() < 1e-9


def test_group_advantages_of_a_known_group() -> None:
    advantages = group_normalised(np.array([[1.0, 0.0, 0.0, 0.0]]))
    assert advantages[0, 0] == pytest.approx(0.75 / 0.5, rel=1e-5)
    assert group_normalised(np.array([[1.0, 0.0]]), by_std=False).tolist() == [[0.5, -0.5]]
    with pytest.raises(ValueError, match="n >= 2"):
        group_normalised(np.ones((3, 1)))


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


def test_token_weights_sum_to_one_and_weigh_as_named() -> None:
    mask = torch.tensor([[1.0, 0, 0, 0], [1, 1, 1, 0]])
    by_token = token_weights(mask, "token-mean")
    by_sequence = token_weights(mask, "seq-mean-token-mean")
    assert by_token.sum().item() == pytest.approx(1) and by_token[0, 0].item() == 0.25
    assert by_sequence.sum().item() == pytest.approx(1) and by_sequence[0, 0].item() == 0.5


def test_kl_controllers_and_their_state() -> None:
    fixed = KlController(KlControl(kl_coef=0.01))
    fixed.update(5.0, 100)
    assert fixed.value == 0.01
    adaptive = KlController(KlControl(type="adaptive", kl_coef=0.01, target_kl=0.1, horizon=1000))
    adaptive.update(1.0, 100)
    assert adaptive.value == pytest.approx(0.01 * (1 + 0.2 * 100 / 1000))
    copy = KlController(KlControl(type="adaptive"))
    copy.load_state_dict(adaptive.state_dict())
    assert copy.value == adaptive.value


def test_seeded_sampling_depends_on_seed_and_position_alone_and_follows_the_distribution() -> None:
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
