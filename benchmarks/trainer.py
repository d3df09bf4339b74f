"""``make bench-trainer``: difference of the trainer from transformers, and between its layouts, in fp32.

Measures on gloo ranks of this machine and adds to benchmarks/results/trainer.json. The GPU figures of that
file come from benchmarks/from_gpu.py.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

from grpo_devcluster.paths import REPO
from grpo_devcluster.results import record

sys.path.insert(0, str(REPO / "tests"))

from support.ranks.compare import largest_gap
from support.ranks.launcher import run as run_on_ranks
from support.ranks.layouts import LAYOUTS


def main() -> None:
    figures: dict[str, float] = {
        "logit_diff_max_fp32": max(_logits(*case) for case in LAYOUTS.values()),
        "gradient_diff_max_fp32": _gradients(),
    }
    print(record("trainer", figures).read_text())


def _logits(model: str, world: int, layout: dict[str, int]) -> float:
    """Return the largest difference of any logit from transformers'."""
    with tempfile.TemporaryDirectory() as folder:
        root = str(Path(folder) / "hf")
        found = run_on_ranks(
            "fidelity_cases:against_transformers", world, root=root, model=model, layout=layout
        )
    return max(float(rank["difference"]) for rank in found if rank["difference"] is not None)


def _gradients() -> float:
    """Return the largest difference from one rank's gradient, relative to the largest entry of its tensor."""
    one: dict[str, Any] = {}
    worst = 0.0
    for model, world, layout in LAYOUTS.values():
        if model not in one:
            one[model] = run_on_ranks("fidelity_cases:gradients", 1, model=model, layout={})[0]
        for found in run_on_ranks("fidelity_cases:gradients", world, model=model, layout=layout):
            worst = max(worst, largest_gap(found, one[model])[0])
    return worst


if __name__ == "__main__":
    main()
