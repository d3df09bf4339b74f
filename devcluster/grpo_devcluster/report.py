"""Summary of a finished run: quarters, test statistic, curve. Runs inside ``.venv``."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import mannwhitneyu

GAP = "train/train_rollout_logprob_abs_diff"
REWARD = "critic/score/mean"
_BLOCKS = " ▁▂▃▄▅▆▇█"


def load(store: Path) -> list[dict[str, Any]]:
    """Return the records of all steps of a run."""
    return [json.loads(line) for line in (store / "metrics.jsonl").read_text().splitlines()]


def summarise(records: list[dict[str, Any]]) -> dict[str, float]:
    """Return figures of a run. p_value: one-sided Mann-Whitney, last quarter against the first."""
    rewards = [r[REWARD] for r in records]
    quarter = max(len(rewards) // 4, 1)
    first, last = rewards[:quarter], rewards[-quarter:]
    mean = {k: float(np.mean([r[k] for r in records])) for k in records[0] if k.startswith("timing_s/")}
    return {
        "reward_first_quarter": float(np.mean(first)),
        "reward_last_quarter": float(np.mean(last)),
        "p_value": float(mannwhitneyu(last, first, alternative="greater").pvalue),
        "logprob_gap_max": float(max(r[GAP] for r in records)),
        "step_seconds": mean["timing_s/step"],
        "sync_seconds": mean["timing_s/update_weights"],
        "steps": len(records),
    }


def terminal_curve(values: list[float], width: int = 60) -> str:
    """Return a one-line curve of block characters."""
    top = max([*values, 1e-9])
    bins = np.array_split(np.array(values), min(width, len(values)))
    return "".join(_BLOCKS[round(float(b.mean()) / top * (len(_BLOCKS) - 1))] for b in bins)


def picture(records: list[dict[str, Any]], target: Path) -> None:
    """Draw the reward curve with its running mean as PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    steps, rewards = [r["step"] for r in records], [r[REWARD] for r in records]
    window = max(len(rewards) // 10, 1)
    smooth = np.convolve(rewards, np.ones(window) / window, mode="valid")
    figure, axes = plt.subplots(figsize=(8, 4.5))
    axes.plot(steps, rewards, ".", alpha=0.5, label="mean reward of a step")
    axes.plot(steps[window - 1 :], smooth, label=f"mean of {window} steps")
    axes.set(xlabel="step", ylabel="reward", title="GRPO on greatest common divisors")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(target, dpi=120)


def main() -> None:
    """Run ``report STORE PNG``: print the curve, write the picture, print the figures as JSON last."""
    store, png = Path(sys.argv[1]), Path(sys.argv[2])
    records = load(store)
    png.parent.mkdir(parents=True, exist_ok=True)
    picture(records, png)
    print(terminal_curve([r[REWARD] for r in records]))
    print(json.dumps(summarise(records)))


if __name__ == "__main__":
    main()
