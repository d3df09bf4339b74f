"""Metrics of one step from its batch, under verl's names."""

from collections.abc import Sequence

import numpy as np
from tensordict import TensorDict


def step_metrics(batch: TensorDict, rewards: Sequence[float], seconds: float, gpus: int) -> dict[str, float]:
    """Return scores, lengths, throughput and the difference between trainer and engines.

    ``training/rollout_probs_diff_mean`` compares probabilities as verl does;
    ``train/train_rollout_logprob_abs_diff`` is mean |log p_trainer - log p_engine| (slime).
    """
    mask = batch["response_mask"].bool()
    trainer, engine = batch["old_log_probs"][mask], batch["rollout_log_probs"][mask]
    gap = (trainer - engine).abs()
    lengths = batch["response_mask"].sum(1)
    tokens = int(batch["attention_mask"].sum())
    return {
        "critic/score/mean": float(np.mean(rewards)),
        "critic/score/max": float(np.max(rewards)),
        "critic/score/min": float(np.min(rewards)),
        "response_length/mean": float(lengths.mean()),
        "train/train_rollout_logprob_abs_diff": float(gap.mean()),
        "train/train_rollout_logprob_abs_diff_max": float(gap.max()),
        "training/rollout_probs_diff_mean": float((trainer.exp() - engine.exp()).abs().mean()),
        "perf/total_num_tokens": float(tokens),
        "perf/throughput": tokens / seconds / gpus,
        "timing_s/step": seconds,
    }
