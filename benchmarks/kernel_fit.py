"""Fits the planner to updates with Transformer Engine and in FP8, and finds its errors (pure).

The cases are those of benchmarks/gpu/update_cases.py. What the GPU computes is fitted to the seconds of its
kernels, what the host does to the seconds of whole updates. A trainer alone has no job's other processes on
its host, so the times of the host count once.
"""

import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from grpo_devcluster.paths import REPO
from grpo_devcluster.results import RESULTS
from grpo_operator.api.catalog.gpus import GPUS, GpuType
from grpo_operator.plan.planner.efficiency import FP8_BLOCK128, TRANSFORMER_ENGINE, Efficiency, of_kernels
from grpo_operator.plan.planner.model.shape import ModelShape
from grpo_operator.plan.planner.training.activations import Workload
from grpo_operator.plan.planner.training.cost import LayoutCost, update_cost
from grpo_operator.plan.planner.training.memory import of_precision, stage_memory

sys.path.insert(0, str(REPO / "benchmarks" / "gpu"))

from update_cases import CASES, FITTED, FP8, LOCAL, MICRO_BATCHES, UpdateCase

_ROUNDS, _STEP, _SHRINK = 400, 0.3, 0.97
_BUSY = 0.8  # share of an update from which on the GPU, not the host, determines its seconds
# The best matrix products reach about these shares of the bf16 peak; beyond them a fit explains other work.
_MOST_FLOPS, _MOST_FLOPS_FP8 = 0.75, 1.4
_GPU, _HOST = (
    ("flops", "activation", "weights", "expert", "optimizer"),
    ("layer", "expert_layer", "local_expert"),
)
Error = Callable[[Efficiency], float]


@dataclass(frozen=True, slots=True)
class Measured:
    """An update as measured: seconds, those of its kernels if they were measured, and bytes at its peak."""

    case: UpdateCase
    seconds: float
    on_gpu: float | None
    peak: int
    gpu: GpuType

    def cost(self, efficiency: Efficiency | None = None) -> LayoutCost:
        """Return the planned seconds; None: with the efficiency that a plan takes."""
        case, alone = self.case, efficiency or of_kernels(self.case.kernels, self.case.precision)
        return update_cost(
            ModelShape.from_hf(case.hf), case.layout, _workload(case), GPUS[self.gpu], 8,
            replace(alone, host=1.0),
        )  # fmt: skip

    def error(self) -> float:
        """Return by how many percent a plan is off."""
        return 100 * abs(self.cost().total / self.seconds - 1)

    @property
    def busy(self) -> bool:
        """Return whether the GPU determines the seconds of the update."""
        return self.on_gpu is not None and self.on_gpu >= _BUSY * self.seconds

    def planned_peak(self) -> int:
        """Return the planned bytes of the fullest stage."""
        return max(self.planned_peaks())

    def planned_peaks(self) -> list[int]:
        """Return the planned bytes of each stage."""
        stages = stage_memory(
            ModelShape.from_hf(self.case.hf), self.case.layout, _workload(self.case),
            precision=of_precision(self.case.precision),
        )  # fmt: skip
        return [stage.total for stage in stages]


def _workload(case: UpdateCase) -> Workload:
    return Workload(
        case.tokens, 1, MICRO_BATCHES, case.recomputed,
        fused=case.kernels is not LOCAL, fp8=case.precision is FP8,
    )  # fmt: skip


def measured() -> list[Measured]:
    """Return all measured cases, those of layouts of several GPUs too."""
    return [
        Measured(
            CASES[name], row["seconds"], row.get("gpu_seconds"), row["peak"], gpu_type(origin["machine"])
        )
        for found in (_results("updates_gpu"), _results("trainer_gpu"))
        for name, row, origin in ((n, row, found["of"][n]) for n, row in found["cases"].items() if n in CASES)
    ]


def _results(name: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def gpu_type(machine: str) -> GpuType:
    """Return the type of the GPUs of a machine, or of one GPU, by its name."""
    return GpuType.H100 if "H100" in machine else GpuType.H200


def fit() -> tuple[Efficiency, Efficiency]:
    """Return the efficiencies of Transformer Engine and of its FP8 that fit best.

    Both start kernels of experts alike, but for the quantization of each.
    """
    rows = [row for row in measured() if row.case in FITTED and row.case.kernels is not LOCAL]
    quantised = [row for row in rows if row.case.precision is FP8]
    plain = _fitted(
        [row for row in rows if row not in quantised], TRANSFORMER_ENGINE, _GPU, _HOST, _MOST_FLOPS
    )
    start = replace(
        plain, flops=FP8_BLOCK128.flops, activation=FP8_BLOCK128.activation,
        local_expert=FP8_BLOCK128.local_expert,
    )  # fmt: skip
    own = ("flops", "activation"), ("layer", "local_expert")
    return plain, _fitted(quantised, start, *own, _MOST_FLOPS_FP8)


def _fitted(
    rows: Sequence[Measured], start: Efficiency, gpu: Sequence[str], host: Sequence[str], most: float
) -> Efficiency:
    """Return the efficiency whose ``gpu`` values fit the kernels' seconds, and then ``host`` the updates'.

    ``most``: of ``flops``.
    """
    computing = [(row, row.on_gpu) for row in rows if row.on_gpu]

    def kernels(efficiency: Efficiency) -> float:
        if efficiency.flops > most or efficiency.weights < 1:  # nothing is read at more than the peak rate
            return float("inf")
        costs = ((row.cost(efficiency), seconds) for row, seconds in computing)
        return sum(((cost.compute + cost.gradients) / seconds - 1) ** 2 for cost, seconds in costs)

    def updates(efficiency: Efficiency) -> float:
        return sum((row.cost(efficiency).total / row.seconds - 1) ** 2 for row in rows)

    return _closest(updates, _closest(kernels, start, gpu), host)


def _closest(error: Error, start: Efficiency, names: Sequence[str]) -> Efficiency:
    """Return the efficiency with the smallest error, by a search along one value at a time."""
    best, step = start, _STEP
    for _ in range(_ROUNDS):
        for name in names:
            value = getattr(best, name)
            tried = [replace(best, **{name: value * factor}) for factor in (1 - step, 1 + step)]
            best = min((best, *tried), key=error)
        step *= _SHRINK
    return best


def figures() -> dict[str, float]:
    """Return errors in percent on the cases that nothing was fitted to.

    ``_busy``: of those whose seconds the GPU determines, not the host.
    """
    held = [row for row in measured() if row.case not in FITTED]
    times = [row.error() for row in held]
    memory = [100 * (row.planned_peak() / row.peak - 1) for row in held]
    return {
        "heldout_updates": len(held),
        "memory_error_pct_heldout_max": round(max(map(abs, memory)), 1),
        "memory_error_pct_heldout_mean": round(statistics.mean(map(abs, memory)), 1),
        "memory_too_low_pct_heldout_max": round(-min(memory), 1),
        "step_time_error_pct_max": round(max(times), 1),
        "step_time_error_pct_max_busy": round(max(row.error() for row in held if row.busy), 1),
        "step_time_error_pct_mean": round(statistics.mean(times), 1),
    }


def machines() -> str:
    """Return the GPUs that the cases were measured on."""
    origins = json.loads((RESULTS / "updates_gpu.json").read_text())["of"].values()
    return ", ".join(sorted({origin["machine"] for origin in origins}))


if __name__ == "__main__":
    for efficiency in fit():
        print(efficiency)
