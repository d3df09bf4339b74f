"""Figures of whole jobs from the metrics of their steps (pure)."""

import statistics
from itertools import pairwise
from typing import Any

Steps = list[dict[str, Any]]
WARM_UP = 2  # steps of a job, and of the baseline, that do not count
SAVES = 4  # steps between two checkpoints of the job that saves
INTERVAL = 600  # seconds between two checkpoints of a real job, an assumption
_PARITY = "train/train_rollout_logprob_abs_diff"


def seconds(history: Steps, name: str, skip: int = 1) -> float:
    """Return the median of a phase over the steps, without the first ones."""
    return float(statistics.median(step.get(f"timing_s/{name}", 0.0) for step in history[skip:]))


def figures(jobs: dict[str, Steps]) -> dict[str, float]:
    """Return ratios of one run: ``on_policy`` beside ``ahead``, and ``saving`` where it was run."""
    own, ahead = jobs["on_policy"], jobs["ahead"]
    step, ahead_step = seconds(own, "step", WARM_UP), seconds(ahead, "step", WARM_UP)
    training = sum(seconds(own[1:], phase) for phase in ("old_log_prob", "ref", "update_actor"))
    saves = save_figures(jobs["saving"], step) if "saving" in jobs else {}
    return (
        saves
        | mfu_figures(own)
        | {
            "tokens_per_step": statistics.median(entry["perf/total_num_tokens"] for entry in own),
            "tokens_per_second": _throughput(own),
            "tokens_per_second_ahead": _throughput(ahead),
            "generation_to_training": seconds(own, "gen", WARM_UP) / training,
            "update_weights_seconds": seconds(own, "update_weights", WARM_UP),
            "overlap_ratio": step / ahead_step,
            "controller_overhead_pct": 100 * seconds(own, "controller_cpu", WARM_UP) / step,
            "logprob_gap_mean": statistics.median(entry[_PARITY] for entry in own),
        }
    )


def kernel_figures(cases: dict[str, Any]) -> dict[str, float]:
    """Return how much shorter a step and its phases are with Transformer Engine's kernels."""
    engine, local = cases["transformer-engine"]["steps"], cases["local"]["steps"]
    names = {"whole_job": "step", "update_actor": "update_actor", "log_probs": "old_log_prob"}
    ratios = {
        f"step_speedup_{name}": seconds(local, phase) / seconds(engine, phase)
        for name, phase in names.items()
    }
    gaps = {
        f"logprob_gap_mean_{name}": statistics.median(entry[_PARITY] for entry in history)
        for name, history in (("engine", engine), ("local", local))
    }
    return ratios | gaps


def mfu_figures(history: Steps) -> dict[str, float]:
    """Return the model FLOPs utilisation of the trainer in percent; nothing where no peak rate is known."""
    found = {}
    for figure, metric in (
        ("update_mfu_pct", "perf/mfu/actor"),
        ("log_prob_mfu_pct", "perf/mfu/actor_infer"),
    ):
        if all(metric in entry for entry in history[WARM_UP:]):
            found[figure] = 100 * statistics.median(entry[metric] for entry in history[WARM_UP:])
    return found


def save_figures(saving: Steps, step: float) -> dict[str, float]:
    """Return the cost of a checkpoint; ``step``: seconds of a step of a job that does not save.

    The cost covers the steps from the first save to just before the next one, because a save also slows the
    steps beside it. Noise can make it negative.
    """
    disturbed = sum(entry["timing_s/step"] for entry in saving[SAVES - 1 : 2 * SAVES - 1])
    cost = disturbed - SAVES * step
    return {
        "checkpoint_seconds": cost,
        f"checkpoint_stall_pct_every_{SAVES}_steps": 100 * cost / disturbed,
        f"checkpoint_stall_pct_at_{INTERVAL}_s_interval": 100 * cost / INTERVAL,
    }


def colocated_figures(history: Steps, megabytes_used: list[int]) -> dict[str, float]:
    """Return seconds of a step's parts, and the most GPU memory that was in use at once."""
    phases = ("gen", "to_trainers", "update_actor", "update_weights", "to_engines", "step")
    result = {f"{phase}_seconds": seconds(history, phase) for phase in phases}
    gap = statistics.median(entry[_PARITY] for entry in history)
    return (
        result | {"logprob_gap_mean": gap, "peak_gigabytes": max(megabytes_used) / 1e3} | mfu_figures(history)
    )


def update_weights_figures(history: Steps) -> dict[str, float]:
    """Return medians, without the first step, of the seconds that a weight version takes a job."""
    parts = ("update_weights", "update_weights_pause", "update_weights_publish")
    return {f"{part}_seconds": seconds(history, part) for part in parts}


def trl_figures(at: list[float], tokens: list[float]) -> dict[str, Any]:
    """Return seconds and tokens of TRL's steps.

    at: clock at the start and after each step. tokens: total number so far, after each step.
    """
    taken = [after - before for before, after in pairwise(at)]
    counts = [after - before for before, after in pairwise([0, *tokens])]
    speeds = [n / t for n, t in zip(counts[WARM_UP:], taken[WARM_UP:], strict=True)]
    return {"seconds": taken, "tokens": counts, "tokens_per_second": statistics.median(speeds)}


def _throughput(history: Steps) -> float:
    """Return tokens per second, prompts and answers both counted."""
    return float(
        statistics.median(e["perf/total_num_tokens"] / e["timing_s/step"] for e in history[WARM_UP:])
    )
