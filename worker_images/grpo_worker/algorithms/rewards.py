"""Token-level rewards from scores: length penalty and KL penalty (torch, on the controller)."""

import torch

from grpo_operator.api.v1alpha1.algorithm import OverlongSpec
from grpo_worker.algorithms.losses import kl_estimate


def overlong_penalty(lengths: torch.Tensor, response_length: int, spec: OverlongSpec) -> torch.Tensor:
    """Return DAPO's soft overlong punishment (arXiv 2503.14476, section 3.4).

    It is 0 up to the buffer and then falls linearly to -penalty. lengths: [rows] response tokens. Returns
    [rows].
    """
    over = lengths.double() - (response_length - spec.buffer_length)
    return -(over / spec.buffer_length).clamp(min=0, max=1) * spec.penalty


def token_rewards(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Place each sample's score at its last response token.

    scores: [rows]. mask: [rows, tokens], 1 at response tokens. Returns [rows, tokens] float64.
    """
    rewards = torch.zeros(mask.shape, dtype=torch.float64)
    positions = torch.arange(mask.shape[1]).expand_as(mask)
    last = torch.where(mask.bool(), positions, -1).max(1).values
    rows = torch.nonzero(last >= 0).flatten()
    rewards[rows, last[rows]] = scores.double()[rows]
    return rewards


def with_kl(
    rewards: torch.Tensor,
    mask: torch.Tensor,
    old: torch.Tensor,
    reference: torch.Tensor,
    kind: str,
    coef: float,
) -> tuple[torch.Tensor, float]:
    """Return the rewards minus each token's KL penalty, and the mean KL over tokens and sequences.

    old, reference: log-probabilities [rows, tokens].
    """
    penalty = kl_estimate(old, reference, kind).double() * mask
    lengths = mask.double().sum(1).clamp(min=1)
    return rewards - coef * penalty, float((penalty.sum(1) / lengths).mean())
