"""Measured times of trainer, engine and weight update, and what the step model counts for each (pure).

A case of kind ``trainer`` is the median of one call. Cases from whole jobs leave out the first step, which
compiles kernels. ``fitted`` cases determine the efficiencies, the other ones are held out.
"""

import json
import math
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from grpo_devcluster.paths import REPO
from grpo_devcluster.results import RESULTS
from grpo_operator.api.catalog.gpus import GPUS, Gpu, GpuType
from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.plan.planner.engines.shape import EngineShape
from grpo_operator.plan.planner.model.shape import ModelShape
from grpo_operator.plan.planner.step.lengths import ResponseLengths
from grpo_operator.plan.planner.training.cost import Rows

sys.path.insert(0, str(REPO / "benchmarks" / "gpu"))

from models import ENGINE_MODELS, GROUP, JOB_MODEL, JOB_TOKENS, MODEL, PROMPTS, RESPONSE, SEQUENCE

H200, H100 = GPUS[GpuType.H200], GPUS[GpuType.H100]
_ROWS = 8  # of a data-parallel rank of trainer_speed.py
_PACKED_ROWS, _PACKED_MEAN, _PACKED_SIGMA, _SHORTEST = 64, 6.0, 0.9, 64
_FITTED_RUNNING = (1, 32, 256)
_PHASES = (("old_log_prob", 1), ("ref", 1), ("update_actor", 3))


@dataclass(frozen=True, slots=True)
class TrainerCase:
    """One call of all ranks. ``job``: the step of a job that it belongs to; "": a trainer alone. ``first``:
    the step's first call.
    """

    name: str
    seconds: float
    fitted: bool
    model: ModelShape
    gpu: Gpu
    layout: Layout
    rows: Rows
    passes: int
    job: str = ""
    first: bool = False


@dataclass(frozen=True, slots=True)
class EngineCase:
    """One step's generation by one engine."""

    name: str
    seconds: float
    fitted: bool
    model: ModelShape
    gpu: Gpu
    shape: EngineShape
    samples: int
    prompt: float
    lengths: ResponseLengths


@dataclass(frozen=True, slots=True)
class DecodeCase:
    """One token of each of ``running`` sequences of ``context`` tokens, by an engine on one GPU."""

    name: str
    seconds: float
    fitted: bool
    model: ModelShape
    gpu: Gpu
    running: int
    context: float


@dataclass(frozen=True, slots=True)
class UpdateCase:
    """One weight update over NVLink. ``senders``: ranks that send at once."""

    name: str
    seconds: float
    fitted: bool
    tensors: int
    bytes: int
    rate: float


def trainer_cases() -> list[TrainerCase]:
    return [*_updates(), *_packing(), *_job_phases()]


def _updates() -> Iterator[TrainerCase]:
    model = ModelShape.from_hf(MODEL)
    measured = _cases("trainer_gpu")["update"]["rows"]
    for row, layout in zip(measured, (Layout(4, expert=4), Layout(4, 2, expert=2)), strict=True):
        assert row["layout"] == str(layout)
        rows = Rows(_ROWS, SEQUENCE, SEQUENCE / 2)
        seconds = statistics.median(row["seconds"]["ours"])
        yield TrainerCase(f"update {layout}", seconds, True, model, H200, layout, rows, 3)


def _packing() -> Iterator[TrainerCase]:
    model, layout = ModelShape.from_hf(MODEL), Layout(4, expert=4)
    measured = _cases("trainer_gpu")["packing"]
    normal = NormalDist(_PACKED_MEAN, _PACKED_SIGMA)
    drawn = [math.exp(normal.inv_cdf((i + 0.5) / 256)) for i in range(256)]
    lengths = [min(max(length, _SHORTEST), SEQUENCE) for length in drawn]
    mean = measured["mean_length"]
    tokens = _PACKED_ROWS * mean
    count = math.ceil(tokens / (2 * SEQUENCE))
    packed = Rows(count, tokens / count, sum(n**2 for n in lengths) / sum(lengths) / 2, _PACKED_ROWS / count)
    padded = Rows(_PACKED_ROWS / 2, 2 * SEQUENCE, SEQUENCE / 2)
    for name, rows in (("packed", packed), ("padded", padded)):
        seconds = statistics.median(measured["seconds"][name])
        yield TrainerCase(f"update, {name}", seconds, True, model, H200, layout, rows, 3)


def _job_phases() -> Iterator[TrainerCase]:
    model, samples = ModelShape.from_hf(JOB_MODEL), PROMPTS * GROUP
    for name, gpu, steps, fitted in _jobs():
        mean = statistics.mean(step["perf/total_num_tokens"] for step in steps) / samples
        count = math.ceil(samples / (JOB_TOKENS // mean))
        rows = Rows(count, samples * mean / count, mean / 2, samples / count)
        for phase, passes in _PHASES:
            seconds = statistics.median(step[f"timing_s/{phase}"] for step in steps)
            title = f"{name}: {phase}"
            first = phase == "old_log_prob"
            yield TrainerCase(title, seconds, fitted, model, gpu, Layout(1), rows, passes, name, first)


def engine_cases() -> list[EngineCase]:
    model, samples = ModelShape.from_hf(JOB_MODEL), PROMPTS * GROUP
    found = []
    for name, gpu, steps, fitted in _jobs():
        generated = [step for step in steps if "timing_s/gen" in step]
        if not generated:
            continue
        seconds = statistics.median(step["timing_s/gen"] for step in generated)
        mean = statistics.mean(step["response_length/mean"] for step in generated)
        prompt = statistics.mean(step["perf/total_num_tokens"] for step in generated) / samples - mean
        lengths = ResponseLengths(RESPONSE, RESPONSE, 0.0)  # random weights rarely end a response
        shape = EngineShape(1)
        found.append(EngineCase(name, seconds, fitted, model, gpu, shape, samples, prompt, lengths))
    return found


def decode_cases() -> list[DecodeCase]:
    """Return the engines of engine_speed.py: those with the numbers of ``_FITTED_RUNNING`` are fitted."""
    content = json.loads((RESULTS / "engine_speed_gpu.json").read_text())["cases"]
    return [
        DecodeCase(
            f"decode, {name}, {row['running']} running", row["decode_seconds_per_token"],
            row["running"] in _FITTED_RUNNING, ModelShape.from_hf(ENGINE_MODELS[name]), H200,
            row["running"], row["context"],
        )
        for name, rows in content.items()
        for row in rows
    ]  # fmt: skip


def update_cases() -> list[UpdateCase]:
    """Return updates within one host. The ones with two receivers are held out."""
    found = []
    for name, case in _cases("sync_gpu").items():
        ranks = 2 if "2 to 2" in name else 1
        seconds = statistics.median(r["pause"] for r in case["rounds"][1:])
        rate = ranks * H200.nvlink
        found.append(UpdateCase(name, seconds, ranks == 1, case["tensors"], case["bytes"], rate))
    return found


def _jobs() -> Iterator[tuple[str, Gpu, list[dict[str, Any]], bool]]:
    for result, case, gpu, fitted in (
        ("job_gpu", "on_policy", H200, True),
        ("job_gpu", "ahead", H200, False),
        ("update_weights_gpu", "on_policy", H200, True),
        ("colocated_gpu", "cuda-ipc", H100, False),
        ("colocated_gpu", "staged", H100, False),
    ):
        found = _cases(result)[case]
        steps = found["steps"] if isinstance(found, dict) else found
        yield f"{result} {case}", gpu, steps[1:], fitted


def _cases(result: str) -> dict[str, Any]:
    cases: dict[str, Any] = json.loads((RESULTS / f"{result}.json").read_text())["cases"]
    return cases
