"""Fits the terms of pod_model.py to small jobs on real pods, and finds the error on tiny-moe.

tiny-moe on two training pods and two engines is held out, and so is a second job. The first fit was 27.3 %
off tiny-moe; the terms for tokens of a layer and for the dispatch to experts were added after that, together
with jobs that determine them. The second job was measured when the model was final. Each of the other jobs
is also predicted without its own measurement, which shows how far the terms carry over.

Run as a program, it prints the terms and all phases of all jobs.
"""

import json
import re
import statistics
from collections.abc import Mapping
from pathlib import Path

from cpu_steps import Compared
from grpo_devcluster.results import RESULTS
from grpo_operator.api.catalog.architectures import architecture
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.plan.planner.model.shape import ModelShape
from pod_cases import CASES, HELD_OUT, SECOND, TINY
from pod_model import PodJob, Terms, fit, phases, predicted

Measured = tuple[PodJob, dict[str, float]]


def measured() -> dict[str, Measured]:
    """Return each job with the mean seconds of its phases. The first step, which compiles, is left out."""
    cases = json.loads((RESULTS / "pod_steps.json").read_text())["cases"]
    return {name: _measured(name, steps[1:]) for name, steps in cases.items()}


def terms() -> Terms:
    """Return the seconds of each term, fitted to all jobs but the held-out one."""
    return fit([found for name, found in measured().items() if name not in HELD_OUT])


def compared(name: str, seconds: Terms) -> list[Compared]:
    """Return the phases of a job beside the estimate, and the whole step last."""
    return _compared(*measured()[name], seconds)


def left_out() -> list[Compared]:
    """Return the step of each other job beside the estimate of terms that were fitted without it."""
    jobs = {name: found for name, found in measured().items() if name not in HELD_OUT}
    return [
        _compared(*found, fit([other for key, other in jobs.items() if key != name]))[-1]
        for name, found in jobs.items()
    ]


def figures() -> dict[str, float]:
    """Return the errors, in percent, of the held-out jobs and of the other ones.

    With the seconds of each term.
    """
    seconds = terms()
    *parts, step = compared(TINY, seconds)
    left = left_out()
    return {
        "cpu_step_model_error_pct_tiny_moe": round(step.error_pct, 1),
        "cpu_step_model_error_pct_second": round(compared(SECOND, seconds)[-1].error_pct, 1),
        "cpu_step_phase_error_pct_max_tiny_moe": round(max(part.error_pct for part in parts), 1),
        "cpu_step_seconds_measured_tiny_moe": round(step.measured, 3),
        "cpu_step_seconds_predicted_tiny_moe": round(step.predicted, 3),
        "cpu_step_model_jobs_fitted": len(left),
        "cpu_step_model_error_pct_max_left_out": round(max(row.error_pct for row in left), 1),
    } | {
        f"cpu_term_{re.sub(r'[^a-z0-9]+', '_', name)}": float(f"{value:.3g}")
        for name, value in seconds.items()
    }


def main() -> None:
    """Print the terms, the phases of all jobs, and the jobs that were left out of the fit."""
    seconds = terms()
    for name, value in seconds.items():
        print(f"{name:<40}{value:12.6f}")
    for found in measured().values():
        for row in _compared(*found, seconds):
            print(f"{row.name:<40}{row.measured:9.3f}{row.predicted:9.3f}{row.error_pct:8.1f} %")
    for row in left_out():
        print(f"{row.name + ', left out':<40}{row.measured:9.3f}{row.predicted:9.3f}{row.error_pct:8.1f} %")


def _compared(job: PodJob, found: Mapping[str, float], seconds: Terms) -> list[Compared]:
    own = predicted(job, seconds)
    rows = [Compared(f"{job.name}: {phase}", found[phase], own[phase]) for phase in own]
    return [*rows, Compared(job.name, sum(row.measured for row in rows), sum(own.values()))]


def _measured(name: str, steps: list[dict[str, float]]) -> Measured:
    case = CASES[name]
    spec = GRPOJobSpec.model_validate(case.spec(name, Path("/models")))
    samples = spec.data.train_batch_size * spec.algorithm.samples_per_prompt
    job = PodJob(
        name,
        spec,
        _layout(spec),
        ModelShape.from_hf(case.model or architecture(TINY)),
        _mean(steps, "perf/total_num_tokens") / samples,
        _mean(steps, "response_length/mean"),
    )
    found = {phase: _mean(steps, f"timing_s/{phase}") for phase in phases(job) if phase != "other"}
    return job, found | {"other": _mean(steps, "timing_s/step") - sum(found.values())}


def _layout(spec: GRPOJobSpec) -> Layout:
    given = spec.trainer.parallelism
    world = spec.trainer.nodes * spec.trainer.gpus_per_node
    expert_tensor = given.expert_tensor or given.tensor
    return Layout(world, given.tensor, expert=given.expert, expert_tensor=expert_tensor)


def _mean(steps: list[dict[str, float]], metric: str) -> float:
    return statistics.mean(step.get(metric, 0.0) for step in steps)


if __name__ == "__main__":
    main()
