"""Advantages of a step's batch: reward shaping, KL penalty, estimator, rollout correction."""

from collections.abc import Sequence

import torch
from tensordict import TensorDict

from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_worker.algorithms.advantages import estimate_advantages, gae
from grpo_worker.algorithms.losses import rollout_weights
from grpo_worker.algorithms.rewards import overlong_penalty, token_rewards, with_kl


def add_advantages(
    batch: TensorDict, scores: Sequence[float], spec: GRPOJobSpec, kl_coef: float
) -> dict[str, float]:
    """Add ``advantages`` (and ``rollout_is_weights``) to the batch; return metrics under verl's names.

    batch [rows, tokens]: response_mask, old_log_probs, rollout_log_probs; ref_log_prob for a KL penalty in
    the rewards; values with a critic, for which ``returns`` are added too.
    """
    config, mask = spec.algorithm, batch["response_mask"]
    shaped = torch.tensor(scores, dtype=torch.float64)
    if config.overlong:
        shaped = shaped + overlong_penalty(mask.sum(1), spec.data.response_length, config.overlong)
    rewards = token_rewards(shaped, mask)
    metrics: dict[str, float] = {}
    if config.use_kl_in_reward:
        old, reference = batch["old_log_probs"], batch["ref_log_prob"]
        rewards, kl = with_kl(rewards, mask, old, reference, config.kl_loss_type, kl_coef)
        metrics |= {"actor/reward_kl_penalty": kl, "actor/reward_kl_penalty_coeff": kl_coef}
    if config.critic:
        batch["advantages"], batch["returns"] = gae(
            rewards, batch["values"], mask, config.gamma, config.critic.lam
        )
        metrics |= _explained(batch["values"], batch["returns"], mask)
    else:
        batch["advantages"] = estimate_advantages(rewards, mask, config)
    metrics["critic/rewards/mean"] = float(rewards.sum(1).mean())
    metrics["critic/advantages/mean"] = float(batch["advantages"][mask.bool()].mean())
    if config.rollout_correction:
        weights = rollout_weights(
            batch["old_log_probs"], batch["rollout_log_probs"], config.rollout_correction.tis_cap
        )
        batch["rollout_is_weights"] = weights * mask
        metrics["rollout_corr/rollout_is_mean"] = float(weights[mask.bool()].mean())
    return metrics


def _explained(values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    inside = mask.bool()
    targets, errors = returns[inside].double(), (returns - values)[inside].double()
    share = 1 - float(errors.var() / (targets.var() + 1e-5))
    return {
        "critic/vf_explained_var": share,
        "critic/values/mean": float(values[inside].mean()),
        "critic/returns/mean": float(targets.mean()),
    }
