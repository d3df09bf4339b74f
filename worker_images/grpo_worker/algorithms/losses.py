"""Policy losses, per token (torch, on the trainer). Shapes are [batch, tokens] throughout."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class PolicyLossConfig:
    """Clip range of PPO and weight of the KL term; names as in verl."""

    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    clip_ratio_c: float = 3.0
    use_kl_loss: bool = True
    kl_loss_type: str = "k3"


def clipped_policy_loss(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    config: PolicyLossConfig,
) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's clipped surrogate with dual clip (arXiv 1707.06347; 1912.09729 for the dual clip).

    Returns (loss, clipped): the loss of each token, and whether the clip was active.
    """
    ratio = torch.exp(torch.clamp(log_prob - old_log_prob, -20.0, 20.0))
    plain = -advantages * ratio
    low, high = 1.0 - config.clip_ratio_low, 1.0 + config.clip_ratio_high
    bounded = -advantages * torch.clamp(ratio, low, high)
    loss = torch.maximum(plain, bounded)
    floor = torch.minimum(loss, -advantages * config.clip_ratio_c)
    loss = torch.where(advantages < 0, floor, loss)
    return loss, bounded > plain


def kl_estimate(log_prob: torch.Tensor, ref_log_prob: torch.Tensor, kind: str) -> torch.Tensor:
    """Per-token estimate of KL(policy || reference) (Schulman, "Approximating KL divergence").

    k1: log ratio, unbiased, may be negative. k2: half its square. k3: unbiased and >= 0.
    """
    log_ratio = torch.clamp(log_prob - ref_log_prob, -20.0, 20.0)
    if kind == "k1":
        return log_ratio
    if kind == "k2":
        return 0.5 * log_ratio.square()
    if kind == "k3":
        return torch.exp(-log_ratio) - 1.0 + log_ratio
    raise ValueError(f"kl_loss_type must be k1, k2 or k3, got {kind!r}")


def token_weights(response_mask: torch.Tensor, mode: str) -> torch.Tensor:
    """Weights that sum to 1 over the batch, so that loss = (weights * token_loss).sum().

    response_mask: [batch, tokens], 1 at response tokens. token-mean weighs tokens equally
    (DAPO), seq-mean-token-mean weighs sequences equally (GRPO).
    """
    mask = response_mask.double()
    if mode == "token-mean":
        return (mask / mask.sum().clamp(min=1)).float()
    if mode == "seq-mean-token-mean":
        lengths = mask.sum(1, keepdim=True).clamp(min=1)
        return (mask / lengths / mask.shape[0]).float()
    raise ValueError(f"loss_agg_mode must be token-mean or seq-mean-token-mean, got {mode!r}")
