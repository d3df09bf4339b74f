"""The padded construction of batches that the ragged one replaced, as the reference of property tests.

Batches are [rows, tokens] tensors, right-padded; see the functions.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from tensordict import TensorDict

from grpo_operator.api.v1alpha1.algorithm import AlgorithmSpec
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_worker.algorithms.losses import kl_estimate, rollout_weights
from grpo_worker.algorithms.rewards import overlong_penalty
from grpo_worker.data.micro_batch import PAD, Batch, MicroBatch, Shape
from grpo_worker.data.prompts import Prompt
from grpo_worker.rollout.sampling import Sample

_EPS = 1e-6


def make_batch(prompts: Sequence[Prompt], samples: Sequence[Sample], pad_id: int) -> TensorDict:
    """Return the samples as rows, right-padded to the longest.

    The result holds [rows, tokens] tensors whose entry t belongs to token t: input_ids (int64),
    attention_mask (bool, true for prompt and response), response_mask and rollout_log_probs (fp32, 0 outside
    the response).
    """
    by_index = {prompt.index: prompt.ids for prompt in prompts}
    rows = [(by_index[s.prompt_index], s) for s in samples]
    longest = max(len(prompt) + len(s.ids) for prompt, s in rows)
    shape = (len(rows), longest)
    ids = np.full(shape, pad_id, dtype=np.int64)
    seen = np.zeros(shape, dtype=np.bool_)
    mask, log_probs = (np.zeros(shape, dtype=np.float32) for _ in range(2))
    for row, (prompt, sample) in enumerate(rows):
        start, end = len(prompt), len(prompt) + len(sample.ids)
        ids[row, :start], ids[row, start:end] = prompt, sample.ids
        seen[row, :end] = True
        mask[row, start:end] = 1
        log_probs[row, start:end] = sample.log_probs
    columns = {
        "input_ids": torch.from_numpy(ids),
        "attention_mask": torch.from_numpy(seen),
        "response_mask": torch.from_numpy(mask),
        "rollout_log_probs": torch.from_numpy(log_probs),
    }
    return TensorDict(columns, batch_size=[len(rows)])


def lengths_of(batch: Batch) -> list[int]:
    """Return the number of tokens of each row, prompt and response."""
    return [int(n) for n in batch["attention_mask"].sum(1)]


def split(batch: Batch, shape: Shape, groups: Sequence[Sequence[int]] | None = None) -> Iterator[MicroBatch]:
    """Split a rank's rows into micro-batches of one shape, on which pipeline stages rely.

    ``groups``: the rows of each packed micro-batch. Groups may be empty, because all data-parallel ranks run
    the same number of micro-batches.
    """
    if groups is not None:
        lengths = lengths_of(batch)
        fullest = max(1, *(sum(lengths[i] for i in group) for group in groups))
        width = math.ceil(fullest / shape.multiple) * shape.multiple
        for group in groups:
            yield _packed(batch, list(group), lengths, width)
        return
    rows = batch["input_ids"].shape[0]
    assert shape.rows is not None, "padded micro-batches need a number of rows"
    for start in range(0, rows, shape.rows):
        yield _padded(batch, list(range(start, min(start + shape.rows, rows))), shape)


def _padded(batch: Batch, indices: list[int], shape: Shape) -> MicroBatch:
    columns = {name: column[indices] for name, column in batch.items()}
    ids = columns.pop("input_ids")
    width = math.ceil(ids.shape[1] / shape.multiple) * shape.multiple
    missing = 0 if shape.rows is None else shape.rows - ids.shape[0]
    ids = torch.nn.functional.pad(ids, (0, width - ids.shape[1], 0, missing), value=PAD)
    positions = torch.arange(width, device=ids.device).expand_as(ids).contiguous()
    lengths = [int(n) for n in columns["attention_mask"].sum(1)]
    return MicroBatch(ids, torch.roll(ids, -1, 1), positions, indices, lengths, columns)


def _packed(batch: Batch, indices: list[int], all_lengths: Sequence[int], width: int) -> MicroBatch:
    lengths = [all_lengths[i] for i in indices]
    padding = width - sum(lengths)
    ids = batch["input_ids"]
    parts = [ids[i, :n] for i, n in zip(indices, lengths, strict=True)]
    spans = [*lengths, padding] if padding else lengths
    if padding:
        parts.append(ids.new_full((padding,), PAD))
    row = torch.cat(parts)[None]
    positions = torch.cat([torch.arange(n, device=ids.device) for n in spans])[None]
    bounds = [0]
    for span in spans:
        bounds.append(bounds[-1] + span)
    columns = {name: column[indices] for name, column in batch.items() if name != "input_ids"}
    return MicroBatch(row, torch.roll(row, -1, 1), positions, indices, lengths, columns, bounds)


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


def token_weights(response_mask: torch.Tensor, mode: str, response_length: int) -> torch.Tensor:
    """Return token weights, so that loss = (weights * token_loss).sum().

    response_mask: [batch, tokens], 1 at response tokens. token-mean weighs all tokens equally (DAPO),
    seq-mean-token-mean all sequences (GRPO). seq-mean-token-sum weighs long sequences more;
    seq-mean-token-sum-norm divides that by the constant ``response_length`` (Dr.GRPO). Sequences without a
    response token do not count.
    """
    mask = response_mask.double()
    if mode == "token-mean":
        return (mask / mask.sum().clamp(min=1)).float()
    lengths = mask.sum(1, keepdim=True)
    sequences = (lengths > 0).sum().clamp(min=1)
    scales = {
        "seq-mean-token-mean": lengths.clamp(min=1),
        "seq-mean-token-sum": torch.ones_like(lengths),
        "seq-mean-token-sum-norm": torch.full_like(lengths, response_length),
    }
    if mode not in scales:
        raise ValueError(f"loss_agg_mode must be token-mean, {', '.join(scales)}, got {mode!r}")
    return (mask / scales[mode] / sequences).float()
