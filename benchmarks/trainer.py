"""``make bench-trainer``: how faithful and how fast the trainer is.

Measures on gloo ranks of this machine, and takes over what benchmarks/gpu/trainer.py and
benchmarks/gpu/planner_memory.py measured on GPUs (benchmarks/results/trainer_gpu.json and
planner_memory.json). Writes benchmarks/results/trainer.json.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from grpo_devcluster.paths import REPO
from grpo_devcluster.results import RESULTS, record

sys.path.insert(0, str(REPO / "tests"))

from test_fidelity import LAYOUTS

from support.ranks.compare import largest_gap
from support.ranks.launcher import run as run_on_ranks


def main() -> None:
    figures: dict[str, float] = {
        "logit_diff_max_fp32": max(_logits(*case) for case in LAYOUTS.values()),
        "gradient_diff_max_fp32": _gradients(),
    }
    gpu = json.loads((RESULTS / "trainer_gpu.json").read_text())
    planner = json.loads((RESULTS / "planner.json").read_text())["figures"]
    figures |= {
        "update_ratio_vs_megatron": gpu["update"]["update_ratio_vs_megatron"],
        "packing_ratio": gpu["packing"]["packing_ratio"],
        "bf16_logprob_diff_mean": gpu["rounding"]["ours_bf16"]["mean"],
        "bf16_logprob_diff_mean_transformers": gpu["rounding"]["transformers_bf16"]["mean"],
        "memory_error_pct_max": planner["memory_error_pct_max"],
    }
    print(record("trainer", figures).read_text())


def _logits(model: str, world: int, layout: dict[str, int]) -> float:
    """Largest difference of any logit from transformers'."""
    with tempfile.TemporaryDirectory() as folder:
        root = str(Path(folder) / "hf")
        found = run_on_ranks(
            "fidelity_cases:against_transformers", world, root=root, model=model, layout=layout
        )
    return max(float(rank["difference"]) for rank in found if rank["difference"] is not None)


def _gradients() -> float:
    """Largest difference from one rank's gradient, relative to the largest entry of its tensor."""
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
