"""Figures of precision.py (pure)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from grpo_worker.algorithms.losses import kl_estimate

PRECISIONS = ("bf16", "fp8")
CURVE, HALVES = "bf16", "bf16-halves"  # the curve beside which others are measured, and its control


def gap(trainer: np.ndarray, engine: np.ndarray) -> dict[str, float]:
    """Return how log-probabilities of tokens that an engine sampled differ from the trainer's.

    ``kl``: estimate of KL(engine || trainer) per token.
    """
    distance = np.abs(trainer - engine)
    estimate = kl_estimate(torch.from_numpy(engine), torch.from_numpy(trainer), "k3")
    return {
        "mean": float(distance.mean()), "p99": float(np.quantile(distance, 0.99)),
        "max": float(distance.max()), "kl": float(estimate.mean()),
    }  # fmt: skip


def curve_distance(wanted: Sequence[float], other: Sequence[float]) -> float:
    """Return the largest relative distance of two curves, point by point."""
    return max(abs(b - a) / a for a, b in zip(wanted, other, strict=True))


def figures(cases: dict[str, Any]) -> dict[str, float]:
    """Return what the cases that were run give."""
    found = {}
    curves = {
        name.removeprefix("curve "): case["held_out"] for name, case in cases.items() if "held_out" in case
    }
    for figure, name in (("fp8_curve_distance_max", "fp8"), ("bf16_curve_distance_max", HALVES)):
        if {name, CURVE} <= curves.keys():
            found[figure] = curve_distance(curves[CURVE], curves[name])
    return found | {f"logprob_gap_{name}": pair["mean"] for name, pair in cases.get("gap", {}).items()}
