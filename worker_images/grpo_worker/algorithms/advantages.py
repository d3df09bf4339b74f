"""Advantage estimators (torch, on the controller).

Sums are computed in float64.
"""

import torch

from grpo_operator.api.v1alpha1.algorithm import AlgorithmSpec

_EPS = 1e-6


def group_advantages(totals: torch.Tensor, config: AlgorithmSpec) -> torch.Tensor:
    """Return the advantage of each sample by an estimator that compares a group's total rewards.

    totals: [rows] float64; ``n`` consecutive rows belong to one prompt. Returns [rows] float64.
    Raises ValueError when the rows do not form whole groups, or for another estimator.
    """
    n = config.samples_per_prompt
    if totals.shape[0] % n:
        raise ValueError(f"{totals.shape[0]} rows do not form groups of n = {n} samples")
    scores = totals.reshape(-1, n)
    if config.adv_estimator == "grpo":
        return _grpo(scores, config.norm_adv_by_std).flatten()
    if config.adv_estimator == "rloo":
        return _rloo(scores).flatten()
    if config.adv_estimator == "reinforce_plus_plus_baseline":
        return _centred(scores).flatten()
    raise ValueError(f"algorithm.advEstimator={config.adv_estimator} does not compare groups")


def _centred(scores: torch.Tensor) -> torch.Tensor:
    return scores - scores.mean(1, keepdim=True)


def _grpo(scores: torch.Tensor, by_std: bool) -> torch.Tensor:
    """Return GRPO's advantages (arXiv 2402.03300, eq. 3), or Dr.GRPO's (2503.20783) without ``by_std``."""
    centred = _centred(scores)
    return centred / (scores.std(1, keepdim=True) + _EPS) if by_std else centred


def _rloo(scores: torch.Tensor) -> torch.Tensor:
    """Return each score minus the mean of the group's other scores (arXiv 2402.14740)."""
    n = scores.shape[1]
    others = (scores.sum(1, keepdim=True) - scores) / (n - 1)
    return scores - others


def gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float
) -> torch.Tensor:
    """Return generalized advantage estimates (arXiv 1506.02438), not whitened.

    Their sum with the values is the return of each token.

    rewards, values (the critic's, before each token), mask: [rows, tokens] float64. Tokens outside the
    response are skipped.
    """
    advantages = torch.zeros_like(rewards)
    next_value, advantage = torch.zeros_like(rewards[:, 0]), torch.zeros_like(rewards[:, 0])
    for token in range(rewards.shape[1] - 1, -1, -1):
        inside = mask[:, token]
        delta = rewards[:, token] + gamma * next_value - values[:, token]
        current = delta + gamma * lam * advantage
        advantage = current * inside + advantage * (1 - inside)
        next_value = values[:, token] * inside + next_value * (1 - inside)
        advantages[:, token] = advantage
    return advantages


def discounted_returns(rewards: torch.Tensor, mask: torch.Tensor, gamma: float) -> torch.Tensor:
    """Return the discounted sum of this and all later rewards at each response token, [rows, tokens]."""
    result, later = torch.zeros_like(rewards), torch.zeros_like(rewards[:, 0])
    for token in range(rewards.shape[1] - 1, -1, -1):
        current = rewards[:, token] + gamma * later
        inside = mask[:, token]
        result[:, token] = current * inside
        later = current * inside + later * (1 - inside)
    return result


def whiten(values: torch.Tensor) -> torch.Tensor:
    """Normalise to mean 0 and sample variance 1. values: one for each response token of the whole batch."""
    count = max(values.numel(), 2)
    centred = values - values.sum() / count
    return centred * torch.rsqrt(centred.square().sum() / (count - 1) + 1e-8)
