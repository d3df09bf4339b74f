"""Policy and value losses per token (torch, on the trainer). Shapes are [batch, tokens] throughout."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

# [rows, tokens] -> [rows, 1], over all tokens of a row, wherever they are
RowSum = Callable[[torch.Tensor], torch.Tensor]


def own_sum(values: torch.Tensor) -> torch.Tensor:
    """Return the sums of rows that are whole."""
    return values.sum(1, keepdim=True)


@dataclass(frozen=True, slots=True)
class PolicyLossConfig:
    """Objective, clip range and further terms of the policy loss; names as in verl."""

    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    clip_ratio_c: float = 3.0
    use_kl_loss: bool = True
    kl_loss_type: str = "k3"
    policy_loss: str = "vanilla"
    entropy_coef: float = 0.0


def policy_loss(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    config: PolicyLossConfig,
    row_sum: RowSum = own_sum,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (loss of each token, whether its clip was active) by the configured objective.

    ``row_sum``: for parts of rows, sums that include the other parts.
    """
    if config.policy_loss == "gspo":
        return sequence_policy_loss(log_prob, old_log_prob, advantages, mask, config, row_sum)
    return clipped_policy_loss(log_prob, old_log_prob, advantages, config)


def sequence_policy_loss(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    config: PolicyLossConfig,
    row_sum: RowSum = own_sum,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (loss, clipped) of GSPO's token form (arXiv 2507.18071, eq. 14).

    The ratio of each token is the geometric mean of its sequence's ratios; the gradient goes through the
    token's own log-probability. mask: 1 at response tokens. ``row_sum``: see policy_loss.
    """
    sequence = row_sum((log_prob.detach() - old_log_prob) * mask) / row_sum(mask).clamp(min=1)
    ratio = torch.exp(torch.clamp(log_prob - log_prob.detach() + sequence, max=10.0))
    plain = -advantages * ratio
    low, high = 1.0 - config.clip_ratio_low, 1.0 + config.clip_ratio_high
    bounded = -advantages * torch.clamp(ratio, low, high)
    return torch.maximum(plain, bounded), bounded > plain


def rollout_weights(old_log_prob: torch.Tensor, rollout_log_prob: torch.Tensor, cap: float) -> torch.Tensor:
    """Return truncated importance weights (truncated importance sampling, TIS).

    They correct for tokens that the engines sampled with slightly different probabilities than the trainer's.
    """
    ratio = torch.exp(torch.clamp(old_log_prob - rollout_log_prob, -20.0, 20.0))
    return torch.clamp(ratio, max=cap)


def clipped_policy_loss(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    config: PolicyLossConfig,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (loss, clipped) of PPO's clipped surrogate (arXiv 1707.06347) with dual clip (1912.09729).

    ``loss`` is that of each token; ``clipped`` tells where the clip was active.
    """
    ratio = torch.exp(torch.clamp(log_prob - old_log_prob, -20.0, 20.0))
    plain = -advantages * ratio
    low, high = 1.0 - config.clip_ratio_low, 1.0 + config.clip_ratio_high
    bounded = -advantages * torch.clamp(ratio, low, high)
    loss = torch.maximum(plain, bounded)
    floor = torch.minimum(loss, -advantages * config.clip_ratio_c)
    loss = torch.where(advantages < 0, floor, loss)
    return loss, bounded > plain


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, cliprange: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (loss of each token, whether its clip was active) of PPO's clipped value loss.

    Source: arXiv 1707.06347, as implemented in OpenAI's baselines.
    """
    near = torch.clamp(values, old_values - cliprange, old_values + cliprange)
    plain, bounded = (values - returns).square(), (near - returns).square()
    return 0.5 * torch.maximum(plain, bounded), bounded > plain


def kl_estimate(log_prob: torch.Tensor, ref_log_prob: torch.Tensor, kind: str) -> torch.Tensor:
    """Return a per-token estimate of KL(policy || reference) (Schulman, "Approximating KL divergence").

    k1: log ratio, unbiased, may be negative. k2: half its square. k3: unbiased and >= 0.
    """
    log_ratio = log_prob - ref_log_prob
    if kind == "k1":
        return log_ratio
    if kind == "k2":
        return 0.5 * log_ratio.square()
    if kind == "k3":  # bounded, so that one very unlikely token does not dominate a batch
        bounded = torch.clamp(log_ratio, -20.0, 20.0)
        return torch.clamp(torch.exp(-bounded) - 1.0 + bounded, max=10.0)
    raise ValueError(f"kl_loss_type must be k1, k2 or k3, got {kind!r}")


def row_weights(lengths: torch.Tensor, mode: str, response_length: int) -> torch.Tensor:
    """Return the weight of each row's response tokens, so that loss = (weights * token_loss).sum().

    lengths: [rows] response tokens. token-mean weighs all tokens equally (DAPO), seq-mean-token-mean all
    sequences (GRPO). seq-mean-token-sum weighs long sequences more; seq-mean-token-sum-norm divides that by
    the constant ``response_length`` (Dr.GRPO). Sequences without a response token do not count.
    """
    tokens = lengths.double()
    one = torch.ones_like(tokens)
    if mode == "token-mean":
        return (one / tokens.sum().clamp(min=1)).float()
    sequences = (tokens > 0).sum().clamp(min=1)
    scales = {
        "seq-mean-token-mean": tokens.clamp(min=1),
        "seq-mean-token-sum": one,
        "seq-mean-token-sum-norm": torch.full_like(tokens, response_length),
    }
    if mode not in scales:
        raise ValueError(f"loss_agg_mode must be token-mean, {', '.join(scales)}, got {mode!r}")
    return (one / scales[mode] / sequences).float()
