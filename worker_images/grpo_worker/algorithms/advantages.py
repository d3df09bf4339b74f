"""Advantage estimators (torch, on the controller).

Shapes are [rows, tokens] throughout; rows are grouped: ``n`` consecutive rows belong to one prompt.
Sums are computed in float64; results are float32 and 0 outside the response.
"""

import torch

from grpo_operator.api.v1alpha1.algorithm import AlgorithmSpec

_EPS = 1e-6


def estimate_advantages(rewards: torch.Tensor, mask: torch.Tensor, config: AlgorithmSpec) -> torch.Tensor:
    """Return the advantage of each token by the configured estimator.

    rewards: token-level rewards. mask: 1 at response tokens.
    Raises ValueError when the rows do not form whole groups.
    """
    rewards, mask, n = rewards.double(), mask.double(), config.samples_per_prompt
    if rewards.shape[0] % n:
        raise ValueError(f"{rewards.shape[0]} rows do not form groups of n = {n} samples")
    kind = config.adv_estimator
    if kind == "gae":
        raise ValueError("gae needs a critic's values: use gae()")
    if kind == "grpo":
        advantages = _per_row(_grpo(_scores(rewards, n), config.norm_adv_by_std), mask)
    elif kind == "rloo":
        advantages = _per_row(_rloo(_scores(rewards, n)), mask)
    elif kind == "reinforce_plus_plus_baseline":
        advantages = whiten(_per_row(_centred(_scores(rewards, n)), mask), mask)
    else:
        advantages = whiten(returns(rewards, mask, config.gamma), mask)
    return (advantages * mask).float()


def _scores(rewards: torch.Tensor, n: int) -> torch.Tensor:
    """Return the total reward of each sample, [prompts, n]."""
    return rewards.sum(1).reshape(-1, n)


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


def _per_row(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return values.reshape(-1, 1) * mask


def gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (whitened advantages, returns) of generalized advantage estimation (arXiv 1506.02438).

    values: the critic's, before each token. Tokens outside the response are skipped.
    """
    rewards, values, mask = rewards.double(), values.double(), mask.double()
    advantages = torch.zeros_like(rewards)
    next_value, advantage = torch.zeros_like(rewards[:, 0]), torch.zeros_like(rewards[:, 0])
    for token in range(rewards.shape[1] - 1, -1, -1):
        inside = mask[:, token]
        delta = rewards[:, token] + gamma * next_value - values[:, token]
        current = delta + gamma * lam * advantage
        advantage = current * inside + advantage * (1 - inside)
        next_value = values[:, token] * inside + next_value * (1 - inside)
        advantages[:, token] = advantage
    return (whiten(advantages, mask) * mask).float(), ((advantages + values) * mask).float()


def returns(rewards: torch.Tensor, mask: torch.Tensor, gamma: float) -> torch.Tensor:
    """Return the discounted sum of this and all later rewards at each response token."""
    result, later = torch.zeros_like(rewards), torch.zeros_like(rewards[:, 0])
    for token in range(rewards.shape[1] - 1, -1, -1):
        current = rewards[:, token] + gamma * later
        inside = mask[:, token]
        result[:, token] = current * inside
        later = current * inside + later * (1 - inside)
    return result


def whiten(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Normalise to mean 0 and sample variance 1 over the response tokens of the whole batch."""
    count = mask.sum().clamp(min=2)
    mean = (values * mask).sum() / count
    variance = ((values - mean).square() * mask).sum() / (count - 1)
    return (values - mean) * torch.rsqrt(variance + 1e-8)
