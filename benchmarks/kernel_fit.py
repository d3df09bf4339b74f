"""Fits the planner to updates with Transformer Engine and in FP8, and finds its errors (pure).

The cases are those of benchmarks/gpu/update_cases.py. A trainer alone has no job's other processes on its
host, so the times of the host count once.
"""

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from grpo_devcluster.paths import REPO
from grpo_devcluster.results import RESULTS
from grpo_operator.api.catalog.gpus import GPUS, GpuType
from grpo_operator.plan.planner.efficiency import FP8_BLOCK128, TRANSFORMER_ENGINE, Efficiency, of_kernels
from grpo_operator.plan.planner.model.shape import ModelShape
from grpo_operator.plan.planner.training.activations import Workload
from grpo_operator.plan.planner.training.cost import update_cost
from grpo_operator.plan.planner.training.memory import of_precision, stage_memory

sys.path.insert(0, str(REPO / "benchmarks" / "gpu"))

from update_cases import CASES, FITTED, FP8, MICRO_BATCHES, UpdateCase

_ROUNDS, _STEP, _SHRINK = 400, 0.3, 0.97


@dataclass(frozen=True, slots=True)
class Measured:
    """An update as measured: seconds, and bytes at its peak."""

    case: UpdateCase
    seconds: float
    peak: int

    def predicted(self, efficiency: Efficiency | None = None) -> float:
        """Return the planned seconds; None: with the efficiency that a plan takes."""
        case, alone = self.case, efficiency or of_kernels(self.case.kernels, self.case.precision)
        cost = update_cost(
            ModelShape.from_hf(case.hf), case.layout, _workload(case), GPUS[GpuType.H200], 8,
            replace(alone, host=1.0),
        )  # fmt: skip
        return cost.total

    def planned_peak(self) -> int:
        (stage,) = stage_memory(
            ModelShape.from_hf(self.case.hf), self.case.layout, _workload(self.case),
            precision=of_precision(self.case.precision),
        )  # fmt: skip
        return stage.total


def _workload(case: UpdateCase) -> Workload:
    return Workload(case.tokens, 1, MICRO_BATCHES, case.recomputed)


def measured() -> list[Measured]:
    """Return all measured cases."""
    rows: Mapping[str, Any] = json.loads((RESULTS / "updates_gpu.json").read_text())["cases"]
    return [Measured(CASES[name], row["seconds"], row["peak"]) for name, row in rows.items()]


def fit() -> tuple[Efficiency, Efficiency]:
    """Return the efficiencies of Transformer Engine and of its FP8 that fit best.

    Both start kernels of experts alike, but for the quantization of each.
    """
    fitted = [row for row in measured() if row.case in FITTED]
    quantised = [row for row in fitted if row.case.precision is FP8]
    names = ("flops", "layer", "expert_layer", "local_expert", "parameter")
    plain = _closest([row for row in fitted if row not in quantised], TRANSFORMER_ENGINE, names)
    start = replace(plain, flops=FP8_BLOCK128.flops, local_expert=FP8_BLOCK128.local_expert)
    return plain, _closest(quantised, start, ("flops", "layer", "local_expert"))


def _closest(rows: Sequence[Measured], start: Efficiency, names: Sequence[str]) -> Efficiency:
    """Return the efficiency with the smallest squared errors, by a search along one value at a time."""

    def error(efficiency: Efficiency) -> float:
        return sum((row.predicted(efficiency) / row.seconds - 1) ** 2 for row in rows)

    best, step = start, _STEP
    for _ in range(_ROUNDS):
        for name in names:
            value = getattr(best, name)
            tried = [replace(best, **{name: value * factor}) for factor in (1 - step, 1 + step)]
            best = min((best, *tried), key=error)
        step *= _SHRINK
    return best


def figures() -> dict[str, float]:
    """Return errors in percent on the cases that nothing was fitted to."""
    held = [row for row in measured() if row.case not in FITTED]
    times = [100 * abs(row.predicted() / row.seconds - 1) for row in held]
    memory = [100 * abs(row.planned_peak() / row.peak - 1) for row in held]
    return {
        "heldout_updates": len(held),
        "memory_error_pct_heldout_max": round(max(memory), 1),
        "memory_error_pct_heldout_mean": round(statistics.mean(memory), 1),
        "step_time_error_pct_max": round(max(times), 1),
        "step_time_error_pct_mean": round(statistics.mean(times), 1),
    }


def machines() -> str:
    """Return the GPUs that the cases were measured on."""
    origins = json.loads((RESULTS / "updates_gpu.json").read_text())["of"].values()
    return ", ".join(sorted({origin["machine"] for origin in origins}))


if __name__ == "__main__":
    for efficiency in fit():
        print(efficiency)
