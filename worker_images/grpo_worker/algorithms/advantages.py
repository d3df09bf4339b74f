"""Advantage estimators (torch, on the controller).

Shapes are [rows, tokens] throughout; rows are grouped: ``n`` neighbouring rows answer one prompt.
Sums are taken in float64, results are float32 and 0 outside the response.
"""

import torch

from grpo_operator.api.v1alpha1.algorithm import AlgorithmSpec

_EPS = 1e-6


def estimate_advantages(rewards: torch.Tensor, mask: torch.Tensor, config: AlgorithmSpec) -> torch.Tensor:
    """Advantage of each token by the configured estimator.

    rewards: token-level rewards. mask: 1 at response tokens.
    Raises ValueError when the rows are no whole groups.
    """
    rewards, mask, n = rewards.double(), mask.double(), config.samples_per_prompt
    if rewards.shape[0] % n:
        raise ValueError(f"{rewards.shape[0]} rows are no groups of n = {n} samples")
    kind = config.adv_estimator
    if kind == "gae":
        raise ValueError("gae needs a critic's values: use gae()")
    if kind == "grpo":
        found = _per_row(_grpo(_scores(rewards, n), config.norm_adv_by_std), mask)
    elif kind == "rloo":
        found = _per_row(_rloo(_scores(rewards, n)), mask)
    elif kind == "reinforce_plus_plus_baseline":
        found = whiten(_per_row(_centred(_scores(rewards, n)), mask), mask)
    else:
        found = whiten(returns(rewards, mask, config.gamma), mask)
    return (found * mask).float()


def _scores(rewards: torch.Tensor, n: int) -> torch.Tensor:
    """[prompts, n]: the whole reward of each sample."""
    return rewards.sum(1).reshape(-1, n)


def _centred(scores: torch.Tensor) -> torch.Tensor:
    return scores - scores.mean(1, keepdim=True)


def _grpo(scores: torch.Tensor, by_std: bool) -> torch.Tensor:
    """arXiv 2402.03300, eq. 3; without the division: Dr.GRPO (arXiv 2503.20783)."""
    centred = _centred(scores)
    return centred / (scores.std(1, keepdim=True) + _EPS) if by_std else centred


def _rloo(scores: torch.Tensor) -> torch.Tensor:
    """Score minus the mean of the others (arXiv 2402.14740)."""
    n = scores.shape[1]
    others = (scores.sum(1, keepdim=True) - scores) / (n - 1)
    return scores - others


def _per_row(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return values.reshape(-1, 1) * mask


def gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalized advantage estimation (arXiv 1506.02438): (whitened advantages, returns).

    values: the critic's, before each token. Tokens outside the response are passed over.
    """
    rewards, values, mask = rewards.double(), values.double(), mask.double()
    found = torch.zeros_like(rewards)
    later_value, later = torch.zeros_like(rewards[:, 0]), torch.zeros_like(rewards[:, 0])
    for token in range(rewards.shape[1] - 1, -1, -1):
        inside = mask[:, token]
        surprise = rewards[:, token] + gamma * later_value - values[:, token]
        here = surprise + gamma * lam * later
        later = here * inside + later * (1 - inside)
        later_value = values[:, token] * inside + later_value * (1 - inside)
        found[:, token] = later
    return (whiten(found, mask) * mask).float(), ((found + values) * mask).float()


def returns(rewards: torch.Tensor, mask: torch.Tensor, gamma: float) -> torch.Tensor:
    """Discounted sum of this and all later rewards at each response token."""
    result, later = torch.zeros_like(rewards), torch.zeros_like(rewards[:, 0])
    for token in range(rewards.shape[1] - 1, -1, -1):
        here = rewards[:, token] + gamma * later
        inside = mask[:, token]
        result[:, token] = here * inside
        later = here * inside + later * (1 - inside)
    return result


def whiten(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean 0 and sample variance 1 over the response tokens of the whole batch."""
    count = mask.sum().clamp(min=2)
    mean = (values * mask).sum() / count
    variance = ((values - mean).square() * mask).sum() / (count - 1)
    return (values - mean) * torch.rsqrt(variance + 1e-8)
