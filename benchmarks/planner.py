"""``make bench-planner``: the planner's figures beside the known and the measured ones.

Writes benchmarks/results/planner.json. The measured bytes were taken on GPUs by
benchmarks/gpu/planner_memory.py and lie in benchmarks/results/planner_memory.json.
"""

import json
from collections import defaultdict
from typing import Any

from grpo_devcluster.results import RESULTS, record
from grpo_operator.api.catalog.architectures import architecture
from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.plan.planner.model import parameters
from grpo_operator.plan.planner.model.shape import ModelShape
from grpo_operator.plan.planner.training.activations import Workload
from grpo_operator.plan.planner.training.memory import stage_memory

LAYOUTS = {
    "tp8_pp16_ep8": Layout(256, 8, 16, 1, 8, layers_in_first_stage=4, layers_in_last_stage=1),
    "tp8_pp8_cp4_ep32": Layout(256, 8, 8, 4, 32, layers_in_first_stage=7, layers_in_last_stage=6),
    "tp1_pp16_ep16": Layout(256, 1, 16, 1, 16, layers_in_first_stage=4, layers_in_last_stage=1),
}
FUZZ_CASES = 10_000  # tests/unit/test_fuzz_spec.py


def main() -> None:
    model = ModelShape.from_hf(architecture("deepseek-v3"))
    figures: dict[str, float] = {
        name: round(max(stage.state for stage in stage_memory(model, layout, Workload(8192))) / 1e9, 2)
        for name, layout in LAYOUTS.items()
    }
    figures["total_parameters"] = parameters.total(model).total
    figures["fuzz_cases"] = FUZZ_CASES
    figures |= _against_measured(json.loads((RESULTS / "planner_memory.json").read_text())["rows"])
    path = record("planner", figures)
    print(path.read_text())


def _against_measured(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Errors of the fullest stage of each measured case, in per cent of the measured peak."""
    cases: dict[tuple[str, bool], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        cases[row["layout"], row["recompute"]].append(row)
    fullest = [max(stages, key=lambda row: row["peak_measured"]) for stages in cases.values()]
    errors = [abs(row["peak_ratio"] - 1) * 100 for row in fullest]
    return {
        "memory_cases": len(fullest),
        "memory_error_pct_max": round(max(errors), 2),
        "memory_error_pct_mean": round(sum(errors) / len(errors), 2),
    }


if __name__ == "__main__":
    main()
