"""The step model on CPUs: a profile of one core, fitted to one job, and its error on others (pure).

The profile belongs to this machine and is no part of the planner. It is fitted to the job ``on_policy`` of
job_cpu.json, whose trainer and engine have a core each. Held out are that file's other jobs. Their steps are
long enough that computation takes almost all of the time; pod_model.py counts what short steps consist of.
"""

import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from grpo_devcluster.results import RESULTS
from grpo_operator.api.catalog.architectures import architecture
from grpo_operator.api.catalog.gpus import GPUS, GpuType
from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.plan.planner.model.shape import ModelShape
from grpo_operator.plan.planner.training.cost import Rows, call_work

# Shape of the model of benchmarks/gpu/job.py --cpu, which imports torch.
SMALL = architecture("tiny-moe") | {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "moe_intermediate_size": 512,
}
SAMPLES = 64  # of a step of that job
FITTED = "on_policy"
_PASSES = {"old_log_prob": 1, "ref": 1, "update_actor": 3}
_CORE = replace(GPUS[GpuType.H100], flops=1e9)  # the fit gives seconds for each 10^9 operations


@dataclass(frozen=True, slots=True)
class Profile:
    """Seconds of one core.

    ``training``, ``generation``: for each 10^9 operations. ``update_weights``: of one weight update.
    """

    training: float
    generation: float
    update_weights: float


@dataclass(frozen=True, slots=True)
class Compared:
    """A phase or a step beside the estimate, in seconds."""

    name: str
    measured: float
    predicted: float

    @property
    def error_pct(self) -> float:
        return 100 * abs(self.predicted / self.measured - 1)


def fit() -> Profile:
    """Return the profile of the fitted job."""
    steps = _steps(FITTED)
    calls = sum(step[f"timing_s/{phase}"] for step in steps for phase in _PASSES)
    work = sum(_training(step) * passes for step in steps for passes in _PASSES.values())
    generated = sum(step["timing_s/gen"] for step in steps)
    updates = statistics.median(step["timing_s/update_weights"] for step in steps)
    return Profile(calls / work, generated / sum(map(_training, steps)), updates)


def compared(profile: Profile) -> list[Compared]:
    """Return the median step of each held-out job beside the estimate: the sum of its phases."""
    return list(_jobs(profile))


def figures() -> dict[str, float]:
    """Return the largest error on the held-out jobs, in percent."""
    return {"cpu_step_model_error_pct_max": round(max(row.error_pct for row in compared(fit())), 1)}


def _jobs(profile: Profile) -> Iterator[Compared]:
    for name in ("ahead", "saving"):
        measured, predicted = [], []
        for step in _steps(name):
            work = _training(step)
            own = {phase: profile.training * work * passes for phase, passes in _PASSES.items()}
            own |= {"gen": profile.generation * work} if "timing_s/gen" in step else {}
            own["update_weights"] = profile.update_weights
            measured.append(sum(step[f"timing_s/{phase}"] for phase in own))
            predicted.append(sum(own.values()))
        yield Compared(name, statistics.median(measured), statistics.median(predicted))


def _training(step: dict[str, Any]) -> float:
    """Return the work of one forward pass over the samples of a step of the CPU job."""
    tokens = step["perf/total_num_tokens"]
    return _work(SMALL, tokens, tokens / SAMPLES)


def _work(hf: dict[str, Any], tokens: float, length: float) -> float:
    """Return 10^9 operations of one forward pass over sequences of ``length`` tokens."""
    return call_work(ModelShape.from_hf(hf), Layout(1), Rows(1, tokens, length / 2), _CORE, 1, 1).flops


def _steps(name: str) -> list[dict[str, Any]]:
    """Return the steps of a job but the first, which compiles."""
    steps: list[dict[str, Any]] = json.loads((RESULTS / "job_cpu.json").read_text())["cases"][name]
    return steps[1:]
