"""Advantages of a step's batch: reward shaping, KL penalty, estimator, rollout correction.

Everything is computed on flat columns. Estimators that look at later tokens run on blocks of rows, padded to
the longest response of the block.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from grpo_operator.api.v1alpha1.algorithm import AlgorithmSpec
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_worker.algorithms.advantages import discounted_returns, gae, group_advantages, whiten
from grpo_worker.algorithms.losses import kl_estimate, rollout_weights
from grpo_worker.algorithms.rewards import overlong_penalty
from grpo_worker.common.ragged_batch import RaggedBatch

_BLOCK = 1 << 24  # entries of a padded block


def add_advantages(
    batch: RaggedBatch, scores: Sequence[float], spec: GRPOJobSpec, kl_coef: float
) -> tuple[RaggedBatch, dict[str, float]]:
    """Return the batch with ``advantages``, and metrics under verl's names.

    batch: response columns old_log_probs and rollout_log_probs; ref_log_prob for a KL penalty in the rewards;
    values with a critic, for which ``returns`` are added too. With rollout correction the column
    ``rollout_is_weights`` is added.
    """
    config = spec.algorithm
    shaped = torch.tensor(scores, dtype=torch.float64)
    if config.overlong:
        lengths = torch.from_numpy(batch.response_lengths)
        shaped = shaped + overlong_penalty(lengths, spec.data.response_length, config.overlong)
    shaped[torch.from_numpy(batch.response_lengths == 0)] = 0  # there is no token to reward
    metrics: dict[str, float] = {}
    penalty: np.ndarray | None = None
    totals = shaped.numpy()
    if config.use_kl_in_reward:
        kl = kl_estimate(_tensor(batch, "old_log_probs"), _tensor(batch, "ref_log_prob"), config.kl_loss_type)
        sums = batch.row_sums(kl.numpy())
        penalty, totals = kl_coef * kl.double().numpy(), totals - kl_coef * sums
        mean = float((sums / batch.response_lengths.clip(min=1)).mean())
        metrics |= {"actor/reward_kl_penalty": mean, "actor/reward_kl_penalty_coeff": kl_coef}
    if config.critic:
        batch = _with_gae(batch, shaped.numpy(), penalty, config)
        metrics |= _explained(batch)
    else:
        batch = _with_advantages(batch, shaped.numpy(), totals, penalty, config)
    metrics["critic/rewards/mean"] = float(totals.mean())
    metrics["critic/advantages/mean"] = _mean_advantage(batch)
    if config.rollout_correction:
        old, engine = _tensor(batch, "old_log_probs"), _tensor(batch, "rollout_log_probs")
        weights = rollout_weights(old, engine, config.rollout_correction.tis_cap)
        batch = batch.with_columns(rollout_is_weights=weights.numpy())
        metrics["rollout_corr/rollout_is_mean"] = float(weights.mean(dtype=torch.float64))
    return batch, metrics


def _tensor(batch: RaggedBatch, name: str) -> torch.Tensor:
    return torch.from_numpy(batch.response[name])


def _with_advantages(
    batch: RaggedBatch,
    shaped: np.ndarray,
    totals: np.ndarray,
    penalty: np.ndarray | None,
    config: AlgorithmSpec,
) -> RaggedBatch:
    """Return the batch with the advantages of its rows, or of its response tokens if these differ.

    shaped: the score of each row, at its last token. totals: the score minus the row's KL penalty.
    """
    if config.adv_estimator != "reinforce_plus_plus":
        rows = group_advantages(torch.from_numpy(totals), config).numpy()
        if config.adv_estimator != "reinforce_plus_plus_baseline":
            return batch.with_rows(advantages=rows.astype(np.float32))
        found = batch.per_token(rows)
    else:
        found = np.empty(int(batch.response_starts[-1]))
        for part, rewards, mask, inside in _blocks(batch, shaped, penalty):
            found[part] = discounted_returns(rewards, mask, config.gamma).numpy()[inside]
    return batch.with_columns(advantages=whiten(torch.from_numpy(found)).float().numpy())


def _mean_advantage(batch: RaggedBatch) -> float:
    """Return the mean over response tokens."""
    if "advantages" in batch.row:
        return float(np.average(batch.row["advantages"], weights=batch.response_lengths))
    return float(batch.response["advantages"].mean(dtype=np.float64))


def _with_gae(
    batch: RaggedBatch, shaped: np.ndarray, penalty: np.ndarray | None, config: AlgorithmSpec
) -> RaggedBatch:
    assert config.critic is not None
    values = batch.response["values"]
    advantages = np.empty(len(values))
    for part, rewards, mask, inside in _blocks(batch, shaped, penalty):
        padded = torch.zeros(rewards.shape, dtype=torch.float64)
        padded[torch.from_numpy(inside)] = torch.from_numpy(values[part]).double()
        advantages[part] = gae(rewards, padded, mask, config.gamma, config.critic.lam).numpy()[inside]
    return batch.with_columns(
        advantages=whiten(torch.from_numpy(advantages)).float().numpy(),
        returns=(advantages + values).astype(np.float32),
    )


def _blocks(
    batch: RaggedBatch, shaped: np.ndarray, penalty: np.ndarray | None
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor, np.ndarray]]:
    """Yield blocks of rows: their place in a column, rewards and mask [rows, tokens] float64, the mask."""
    lengths, starts = batch.response_lengths, batch.response_starts
    size = max(1, _BLOCK // max(1, int(lengths.max())))
    for first in range(0, batch.rows, size):
        rows = np.arange(first, min(first + size, batch.rows))
        part = slice(int(starts[rows[0]]), int(starts[rows[-1] + 1]))
        inside = np.arange(int(lengths[rows].max())) < lengths[rows, None]
        rewards = np.zeros(inside.shape)
        filled = np.flatnonzero(lengths[rows])
        rewards[filled, lengths[rows][filled] - 1] = shaped[rows][filled]
        if penalty is not None:
            rewards[inside] -= penalty[part]
        yield part, torch.from_numpy(rewards), torch.from_numpy(inside.astype(np.float64)), inside


def _explained(batch: RaggedBatch) -> dict[str, float]:
    values, returns = batch.response["values"], batch.response["returns"]
    share = 1 - float(
        (returns.astype(np.float64) - values).var(ddof=1) / (returns.var(ddof=1, dtype=np.float64) + 1e-5)
    )
    return {
        "critic/vf_explained_var": share,
        "critic/values/mean": float(values.mean(dtype=np.float64)),
        "critic/returns/mean": float(returns.mean(dtype=np.float64)),
    }
