"""``make bench-planner``: the planner's figures beside published and measured values.

Writes benchmarks/results/planner.json. The measured bytes of benchmarks/results/planner_memory.json come from
benchmarks/gpu/planner_memory.py, which trains with PyTorch's Adam. The formulas were corrected on the same
layouts, so ``memory_error_*`` is an error on the training set and not on new layouts. The operator plans with
a fused Adam, which needs less memory: ``memory_error_fused_*`` compares that plan with the same measurements.
"""

import json
import sys
from collections import defaultdict
from typing import Any

from grpo_devcluster.paths import REPO
from grpo_devcluster.results import RESULTS, record
from grpo_operator.api.catalog.architectures import architecture
from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.plan.planner.model import parameters
from grpo_operator.plan.planner.model.shape import ModelShape
from grpo_operator.plan.planner.training.activations import Workload
from grpo_operator.plan.planner.training.memory import stage_memory

sys.path.insert(0, str(REPO / "benchmarks" / "gpu"))

from models import MEASURED_LAYOUTS, MICRO_BATCHES, MODEL, SEQUENCE

LAYOUTS = {
    "tp8_pp16_ep8": Layout(256, 8, 16, 1, 8, layers_in_first_stage=4, layers_in_last_stage=1),
    "tp8_pp8_cp4_ep32": Layout(256, 8, 8, 4, 32, layers_in_first_stage=7, layers_in_last_stage=6),
    "tp1_pp16_ep16": Layout(256, 1, 16, 1, 16, layers_in_first_stage=4, layers_in_last_stage=1),
}


def main() -> None:
    model = ModelShape.from_hf(architecture("deepseek-v3"))
    figures: dict[str, float] = {
        name: round(max(stage.state for stage in stage_memory(model, layout, Workload(8192))) / 1e9, 2)
        for name, layout in LAYOUTS.items()
    }
    figures["total_parameters"] = parameters.total(model).total
    rows = [row for case in _measured().values() for row in case]
    figures["memory_cases"] = len(_fullest(rows))
    figures |= _errors(rows, "memory_error", fused_optimizer=False)
    figures |= _errors(rows, "memory_error_fused", fused_optimizer=True)
    path = record("planner", figures)
    print(path.read_text())


def _measured() -> dict[str, list[dict[str, Any]]]:
    cases: dict[str, list[dict[str, Any]]] = json.loads((RESULTS / "planner_memory.json").read_text())[
        "cases"
    ]
    return cases


def _errors(rows: list[dict[str, Any]], name: str, fused_optimizer: bool) -> dict[str, float]:
    """Return errors in percent of the measured peak: of the fullest stages, and the largest of any stage."""
    error = {id(row): 100 * abs(_planned(row, fused_optimizer) / row["peak_measured"] - 1) for row in rows}
    fullest = [error[id(row)] for row in _fullest(rows)]
    return {
        f"{name}_pct_max": round(max(fullest), 2),
        f"{name}_pct_mean": round(sum(fullest) / len(fullest), 2),
        f"{name}_pct_max_any_stage": round(max(error.values()), 2),
    }


def _fullest(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the row of the fullest stage of each layout, with and without recomputation."""
    cases: dict[tuple[str, bool], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        cases[row["layout"], row["recompute"]].append(row)
    return [max(stages, key=lambda row: int(row["peak_measured"])) for stages in cases.values()]


def _planned(row: dict[str, Any], fused_optimizer: bool) -> int:
    """Return the peak in bytes that the planner predicts now for a measured row."""
    workload = Workload(SEQUENCE, 1, MICRO_BATCHES, row["recompute"])
    stages = stage_memory(
        ModelShape.from_hf(MODEL), _layout(row["layout"]), workload, fused_optimizer=fused_optimizer
    )
    return stages[int(row["stage"])].total


def _layout(name: str) -> Layout:
    """Return the measured layout whose text is ``name``."""
    layouts = [Layout(world=4, **sizes) for sizes in MEASURED_LAYOUTS]
    return next(layout for layout in layouts if str(layout) == name)


if __name__ == "__main__":
    main()
