"""Metrics of one step from its batch, under verl's names."""

from collections.abc import Sequence

import numpy as np

from grpo_worker.common.ragged_batch import RaggedBatch


def step_metrics(batch: RaggedBatch, rewards: Sequence[float], seconds: float, gpus: int) -> dict[str, float]:
    """Return scores, lengths, throughput and the difference between trainer and engines.

    ``training/rollout_probs_diff_mean`` compares probabilities as verl does;
    ``train/train_rollout_logprob_abs_diff`` is mean |log p_trainer - log p_engine| (slime).
    """
    trainer, engine = batch.response["old_log_probs"], batch.response["rollout_log_probs"]
    gap = np.abs(trainer - engine)
    return {
        "critic/score/mean": float(np.mean(rewards)),
        "critic/score/max": float(np.max(rewards)),
        "critic/score/min": float(np.min(rewards)),
        "response_length/mean": float(batch.response_lengths.mean()),
        "train/train_rollout_logprob_abs_diff": float(gap.mean(dtype=np.float64)),
        "train/train_rollout_logprob_abs_diff_max": float(gap.max()),
        "training/rollout_probs_diff_mean": float(
            np.abs(np.exp(trainer) - np.exp(engine)).mean(dtype=np.float64)
        ),
        "perf/total_num_tokens": float(batch.tokens),
        "perf/throughput": batch.tokens / seconds / gpus,
        "timing_s/step": seconds,
    }
