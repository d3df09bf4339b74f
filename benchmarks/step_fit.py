"""Fits the planner's efficiencies to measured cases, and finds the error on all of them (pure)."""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from grpo_operator.plan.planner.efficiency import MEASURED, Efficiency
from grpo_operator.plan.planner.engines.shape import EngineShape
from grpo_operator.plan.planner.step.decode import Engine
from grpo_operator.plan.planner.step.generation import generation
from grpo_operator.plan.planner.training.cost import call_cost, call_work
from step_cases import (
    DecodeCase,
    EngineCase,
    TrainerCase,
    UpdateCase,
    decode_cases,
    engine_cases,
    trainer_cases,
    update_cases,
)  # fmt: skip

_NODE = 8  # GPUs of a host
_UPDATE = "weight update, "


@dataclass(frozen=True, slots=True)
class Found:
    """A case beside the model's estimate, in seconds. ``job``: the job whose step it belongs to, or ""."""

    name: str
    job: str
    measured: float
    predicted: float
    fitted: bool

    @property
    def error_pct(self) -> float:
        return 100 * abs(self.predicted / self.measured - 1)


def fit() -> Efficiency:
    """Return the efficiencies with the smallest squared relative error on the fitted cases."""
    trainer = [case for case in trainer_cases() if case.fitted]
    alone = [case for case in trainer if not case.job]
    flops, layer, expert, sequence = _least_squares(
        [_terms(case) for case in alone],
        [case.seconds - _traffic(case) for case in alone],
        relative=True,
    )
    found = replace(
        MEASURED,
        flops=1 / flops,
        layer=layer,
        local_expert=expert,
        packed_sequence=sequence,
        host=1.0,
        first_call=0.0,
    )
    jobs = [case for case in trainer if case.job]
    parts = [_cost(case, found) for case in jobs]
    host, first = _least_squares(
        [[launch, case.first] for case, (_, launch) in zip(jobs, parts, strict=True)],
        [case.seconds - compute for case, (compute, _) in zip(jobs, parts, strict=True)],
    )
    updates = [case for case in update_cases() if case.fitted]
    start, tensor = _least_squares(
        [[1.0, case.tensors] for case in updates],
        [case.seconds - case.bytes / (case.rate * found.link) for case in updates],
    )
    found = replace(found, host=host, first_call=first, update_start=start, update_tensor=tensor)
    return _fit_engines(found)


def _fit_engines(found: Efficiency) -> Efficiency:
    """Fit the terms of decoding that bytes and operations do not explain."""
    decode = [case for case in decode_cases() if case.fitted]
    plain = replace(found, decode_layer=0.0, decode_expert_layer=0.0, decode_sequence=0.0)
    layer, expert, sequence = _least_squares(
        [
            [case.model.dense_layers, case.model.layers - case.model.dense_layers, case.running]
            for case in decode
        ],
        [case.seconds - _decoded(case, plain) for case in decode],
        relative=True,
    )
    found = replace(found, decode_layer=layer, decode_expert_layer=expert, decode_sequence=sequence)
    engines = [case for case in engine_cases() if case.fitted]
    without = replace(found, deterministic_layer=0.0)
    (slow,) = _least_squares(
        [[case.model.layers * case.lengths.mean] for case in engines],
        [case.seconds - _generated(case, without) for case in engines],
    )
    return replace(found, deterministic_layer=slow)


def compared(efficiency: Efficiency) -> list[Found]:
    """Return every case beside the estimate."""
    rows = [
        Found(case.name, case.job, case.seconds, sum(_cost(case, efficiency)), case.fitted)
        for case in trainer_cases()
    ]
    rows += [
        Found(f"{case.name}: gen", case.name, case.seconds, _generated(case, efficiency), case.fitted)
        for case in engine_cases()
    ]
    rows += [
        Found(case.name, "", case.seconds, _decoded(case, efficiency), case.fitted) for case in decode_cases()
    ]
    return rows + [
        Found(_UPDATE + case.name, "", case.seconds, _updated(case, efficiency), case.fitted)
        for case in update_cases()
    ]


def steps(rows: Sequence[Found]) -> list[Found]:
    """Return the jobs' whole steps: the sum of their phases."""
    jobs: dict[str, list[Found]] = defaultdict(list)
    for row in rows:
        if row.job:
            jobs[row.job].append(row)
    return [
        Found(name, name, sum(p.measured for p in parts), sum(p.predicted for p in parts), parts[0].fitted)
        for name, parts in jobs.items()
    ]


def figures(efficiency: Efficiency) -> dict[str, float]:
    """Return the largest and the mean error of held-out steps, phases, decodes and updates, in percent."""
    rows = compared(efficiency)
    groups = {
        "step_model": steps(rows),
        "step_phase": [row for row in rows if row.job],
        "decode_model": [row for row in rows if row.name.startswith("decode, ")],
        "update_model": [row for row in rows if row.name.startswith(_UPDATE)],
    }
    result: dict[str, float] = {}
    for name, group in groups.items():
        held = [row.error_pct for row in group if not row.fitted]
        result[f"{name}_cases"] = len(held)
        result[f"{name}_error_pct_max"] = round(max(held), 1)
        result[f"{name}_error_pct_mean"] = round(statistics.mean(held), 1)
    return result


def _terms(case: TrainerCase) -> list[float]:
    work = call_work(case.model, case.layout, case.rows, case.gpu, _NODE, case.passes)
    return [work.flops, work.layers, work.experts, work.sequences]


def _traffic(case: TrainerCase) -> float:
    work = call_work(case.model, case.layout, case.rows, case.gpu, _NODE, case.passes)
    return (work.tensor + work.expert + work.context) / MEASURED.link


def _cost(case: TrainerCase, efficiency: Efficiency) -> tuple[float, float]:
    """Return the seconds of GPU and links, and those of the host."""
    if not case.job:
        efficiency = replace(efficiency, host=1.0)
    cost = call_cost(
        case.model, case.layout, case.rows, case.gpu, _NODE, passes=case.passes, efficiency=efficiency
    )
    return cost.total - cost.launch + case.first * efficiency.first_call, cost.launch


def _generated(case: EngineCase, efficiency: Efficiency) -> float:
    # The measured jobs ran with deterministic kernels.
    engine = Engine(case.model, case.shape, case.gpu, _NODE, efficiency, deterministic=True)
    return generation(engine, case.lengths, case.prompt, case.samples, case.samples).total


def _decoded(case: DecodeCase, efficiency: Efficiency) -> float:
    engine = Engine(case.model, EngineShape(1), case.gpu, _NODE, efficiency)
    return engine.decode_seconds(case.running, case.context)


def _updated(case: UpdateCase, efficiency: Efficiency) -> float:
    wire = case.bytes / (case.rate * efficiency.link)
    return efficiency.update_start + case.tensors * efficiency.update_tensor + wire


def _least_squares(
    rows: Sequence[Sequence[float]], wanted: Sequence[float], *, relative: bool = False
) -> list[float]:
    """Return the non-negative x that minimises the squares of row . x - wanted, by coordinate descent.

    ``relative``: of the errors divided by ``wanted``, for cases of different sizes. Repeated measurements of
    one case need absolute errors: relative ones favour the fastest run.
    """
    weights = [1 / w if relative else 1.0 for w in wanted]
    scaled = [[value * weight for value in row] for row, weight in zip(rows, weights, strict=True)]
    targets = [w * weight for w, weight in zip(wanted, weights, strict=True)]
    result = [0.0] * len(scaled[0])
    for _ in range(100_000):
        moved = 0.0
        for i in range(len(result)):
            square = sum(row[i] ** 2 for row in scaled)
            if not square:
                continue
            rest = [
                target - _dot(row, result) + row[i] * result[i]
                for row, target in zip(scaled, targets, strict=True)
            ]
            best = max(_dot([row[i] for row in scaled], rest) / square, 0.0)
            moved = max(moved, abs(best - result[i]) * square**0.5)
            result[i] = best
        if moved < 1e-12:
            break
    return result


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))
