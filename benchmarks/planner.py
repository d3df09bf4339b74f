"""``make bench-planner``: the planner's figures beside published and measured values.

Writes benchmarks/results/planner.json. The measured bytes come from benchmarks/gpu/planner_memory.py. The
formulas were corrected on the cases of planner_memory.json, so ``memory_error_*`` is an error on the training
set. Nothing was fitted to the models and row lengths of planner_memory_held_out.json:
``memory_held_out_error_*`` is the error there with PyTorch's Adam, ``memory_held_out_fused_error_*`` with the
fused Adam that the operator plans with.

``step_model_*`` are errors of the step model on measured steps that did not take part in its fit: jobs of
the same model on other days, on another GPU type, and one step ahead. ``step_phase_*`` are those of their
single phases, ``update_model_*`` those of weight updates between two ranks and an engine of two.
In trainer.json ``memory_error_pct_heldout_max`` and ``step_time_error_pct_max`` are errors on updates with
Transformer Engine, in FP8 and with each kind of recomputation that nothing was fitted to (kernel_fit.py).
``cpu_step_model_error_pct_max`` is the error of a profile of one core, fitted to one job, on other jobs on
CPUs (cpu_steps.py); those of ``tiny_moe`` and ``left_out`` are errors of terms fitted to small jobs on real
pods, on tiny-moe and on each of the jobs in turn (pod_fit.py). ``--fit`` prints the fit, the values of
``grpo_operator.plan.planner.efficiency.MEASURED``; ``python benchmarks/kernel_fit.py`` prints the other ones.
"""

import json
import sys
from collections import defaultdict
from typing import Any

from grpo_devcluster.paths import REPO
from grpo_devcluster.results import RESULTS, machine, record, stamp
from grpo_operator.api.catalog.architectures import architecture
from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.api.v1alpha1.recompute import Recompute, RecomputeKind, RecomputeModule
from grpo_operator.plan.planner.efficiency import MEASURED
from grpo_operator.plan.planner.model import parameters
from grpo_operator.plan.planner.model.shape import ModelShape
from grpo_operator.plan.planner.training.activations import Workload
from grpo_operator.plan.planner.training.memory import stage_memory

sys.path.insert(0, str(REPO / "benchmarks" / "gpu"))

from models import FITTED_CASES, HELD_OUT_CASES, MICRO_BATCHES

import cpu_steps
import kernel_fit
import pod_fit
import step_fit

LAYOUTS = {
    "tp8_pp16_ep8": Layout(256, 8, 16, 1, 8, layers_in_first_stage=4, layers_in_last_stage=1),
    "tp8_pp8_cp4_ep32": Layout(256, 8, 8, 4, 32, layers_in_first_stage=7, layers_in_last_stage=6),
    "tp1_pp16_ep16": Layout(256, 1, 16, 1, 16, layers_in_first_stage=4, layers_in_last_stage=1),
}


_FUSED = ", fused Adam"  # the end of such a case's name


def main() -> None:
    model = ModelShape.from_hf(architecture("deepseek-v3"))
    figures: dict[str, float] = {
        name: round(max(stage.state for stage in stage_memory(model, layout, Workload(8192))) / 1e9, 2)
        for name, layout in LAYOUTS.items()
    }
    figures["total_parameters"] = parameters.total(model).total
    figures |= step_fit.figures(MEASURED) | cpu_steps.figures() | pod_fit.figures()
    record("planner", figures)
    record("trainer", kernel_fit.figures(), stamp(f"planned: {machine()}; measured: {kernel_fit.machines()}"))
    for name, raw, keep in (
        ("memory", "planner_memory", lambda case: True),
        ("memory_held_out", "planner_memory_held_out", lambda case: not case.endswith(_FUSED)),
        ("memory_held_out_fused", "planner_memory_held_out", lambda case: case.endswith(_FUSED)),
    ):
        content = json.loads((RESULTS / f"{raw}.json").read_text())
        cases = {case: rows for case, rows in content["cases"].items() if keep(case)}
        gpus = ", ".join(sorted({content["of"][case]["machine"] for case in cases}))
        record("planner", _errors(name, cases), stamp(f"planned: {machine()}; measured: {gpus}"))
    print((RESULTS / "planner.json").read_text())


def _errors(name: str, cases: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    """Return the number of cases, and errors in percent of the measured peak.

    A case is a layout with one kind of recomputation; its error is that of its fullest stage.
    ``any_stage``: the largest error of any stage.
    """
    error = {id(row): abs(_error(case, row)) for case, rows in cases.items() for row in rows}
    fullest = [error[id(row)] for rows in cases.values() for row in _fullest(rows)]
    return {
        f"{name}_cases": len(fullest),
        f"{name}_error_pct_max": round(max(fullest), 2),
        f"{name}_error_pct_mean": round(sum(fullest) / len(fullest), 2),
        f"{name}_error_pct_max_any_stage": round(max(error.values()), 2),
    }


def _fullest(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the row of the fullest stage, with each kind of recomputation."""
    kinds: dict[Recompute, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        kinds[_recompute(row)].append(row)
    return [max(stages, key=lambda row: int(row["peak_measured"])) for stages in kinds.values()]


def _recompute(row: dict[str, Any]) -> Recompute:
    """Return what a case recomputed; the oldest rows have no modules."""
    modules = tuple(RecomputeModule(name) for name in row.get("modules", ()))
    return Recompute(RecomputeKind(row["recompute"]), modules)


def _error(case: str, row: dict[str, Any]) -> float:
    """Return the error, in percent, of the peak that the planner predicts now for a measured row."""
    of = (FITTED_CASES | HELD_OUT_CASES)[case.removesuffix(_FUSED)]
    workload = Workload(of.sequence, 1, MICRO_BATCHES, _recompute(row))
    fused = case.endswith(_FUSED)
    stages = stage_memory(ModelShape.from_hf(of.hf), of.layout, workload, fused_optimizer=fused)
    return 100 * (stages[int(row["stage"])].total / int(row["peak_measured"]) - 1)


if __name__ == "__main__":
    if "--fit" in sys.argv:
        print(step_fit.fit())
    else:
        main()
