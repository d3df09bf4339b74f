"""The time of a step on real pods of CPUs, phase by phase, as counts of physical terms (pure).

A phase is a sum of terms: how often something happens, which follows from the job's spec and model, times
the seconds of one such event, which :func:`fit` finds on jobs other than the one that checks the model. On a
CPU, and for models this small, calls between processes and the start of operations take most of the time.

Ranks do their own work at the same time, and so do engines; beside others it takes a fitted factor longer
than alone. Requests and sampled tokens pass through processes that share all cores, so they count with their
total.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import nnls

from grpo_operator.api.catalog.gpus import GPUS, GpuType
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.plan.planner.model.parameters import hf_tensors
from grpo_operator.plan.planner.model.shape import ModelShape
from grpo_operator.plan.planner.training.cost import Rows, call_work, passes_of_update
from grpo_operator.plan.planner.training.recompute import planned_recompute

_CORE = replace(GPUS[GpuType.H100], flops=1e9)  # counts 10^9 operations
Terms = dict[str, float]
RANKS, ENGINES = "factor of ranks beside others", "factor of engines beside others"
_FACTORS = [1 + 0.05 * i for i in range(61)]
# Phases that share terms, with the factor of their work.
_GROUPS = (
    (("old_log_prob", "ref", "update_actor"), RANKS),
    (("gen",), ENGINES),
    (("update_weights",), ""),
    (("save_checkpoint",), ""),
    (("other",), ""),
)


@dataclass(frozen=True, slots=True)
class PodJob:
    """Everything that the time of a step depends on.

    ``length``: mean tokens of a sample. ``response``: those of them that were sampled.
    """

    name: str
    spec: GRPOJobSpec
    layout: Layout
    model: ModelShape
    length: float
    response: float

    @property
    def samples(self) -> int:
        return self.spec.data.train_batch_size * self.spec.algorithm.samples_per_prompt

    @property
    def engines(self) -> int:
        template = self.spec.rollout.template
        assert template is not None, "the job has engines of its own"
        return template.replicas

    @property
    def micro_batches(self) -> int:
        """Return the micro-batches of one rank, of padded rows."""
        return -(-self.samples // self.layout.data // self.spec.trainer.micro_batch_size_per_gpu)


def phases(job: PodJob, ranks: float = 1.0, engines: float = 1.0) -> dict[str, Terms]:
    """Return for each phase how often each of its terms occurs.

    ``ranks``, ``engines``: factors of their work when there are several.
    """
    layout = job.layout
    recompute = planned_recompute(job.spec.trainer, job.model)
    passes = passes_of_update(job.model, layout, _rows(job, job.samples), recompute)
    update, forward = _call(job, passes, ranks), _call(job, 1, ranks)
    saves, tensors = 1 / job.spec.checkpoint.every_steps, _local_tensors(job)
    found = {
        "gen": _generation(job, engines),
        "old_log_prob": forward | {"first call of a step": 1.0},
        "update_actor": update | {"optimizer tensor": tensors},
        "update_weights": {
            "weight transaction": 1.0,
            "engine updated": float(job.engines),
            "tensor sent": float(hf_tensors(job.model)),
        },
        "save_checkpoint": {
            "checkpoint": saves,
            "tensor of a checkpoint": saves * tensors * layout.world / layout.data,
        },
        "other": {"step": 1.0, "sample": float(job.samples)},
    }
    return found | ({"ref": forward} if job.spec.algorithm.needs_reference else {})


def fit(measured: Sequence[tuple[PodJob, Mapping[str, float]]]) -> Terms:
    """Return the seconds of each term, with the smallest squared relative errors of the jobs' phases."""
    found: Terms = {}
    for group, factor in _GROUPS:
        rows = {
            value: [
                (terms, seconds[phase])
                for job, seconds in measured
                for phase, terms in phases(job, value, value).items()
                if phase in group
            ]
            for value in (_FACTORS if factor else [1.0])
        }
        solved = {value: _solve(of_value) for value, of_value in rows.items()}
        best = min(solved, key=lambda value: solved[value][0])
        found |= solved[best][1] | ({factor: best} if factor else {})
    return found


def predicted(job: PodJob, seconds: Terms) -> dict[str, float]:
    """Return the seconds of each phase of a step."""
    return {
        phase: sum(count * seconds[name] for name, count in terms.items())
        for phase, terms in phases(job, seconds[RANKS], seconds[ENGINES]).items()
    }


def _solve(rows: Sequence[tuple[Terms, float]]) -> tuple[float, Terms]:
    """Return the error and the seconds of each term. ``rows``: counts of terms, and measured seconds."""
    names = list(dict.fromkeys(name for terms, _ in rows for name in terms))
    relative = [[terms.get(name, 0.0) / wanted for name in names] for terms, wanted in rows]
    solution, error = nnls(np.array(relative), np.ones(len(rows)))
    return float(error), dict(zip(names, map(float, solution), strict=True))


def _call(job: PodJob, passes: float, beside: float) -> Terms:
    """Count the terms of one call of all ranks: of one rank, because they work at the same time."""
    model, layout = job.model, job.layout
    mixtures = model.layers - model.dense_layers
    slowed = beside if layout.world > 1 else 1.0
    times = job.micro_batches * passes
    local = model.experts.count / layout.expert if model.experts else 0.0
    tokens = job.samples * job.length / layout.data / layout.tensor  # of a rank
    travels = _travels(job)
    return {
        "worker-group call": 1.0,
        "sample of a call": float(job.samples / layout.data),
        "layer": slowed * times * model.layers,
        "local expert": slowed * times * mixtures * local,
        "10^6 activations": slowed * tokens * model.hidden * model.layers * passes / 1e6,
        "10^3 tokens of a layer": slowed * tokens * model.layers * passes / 1e3,
        "10^9 operations": slowed * _operations(job, job.samples) * passes / layout.data / layout.tensor,
        "collective": float(times * 4 * model.layers * (layout.tensor > 1)),
        "dispatch to experts": float(times * mixtures * (layout.expert > 1)),
        "10^3 tokens dispatched": tokens * mixtures * (layout.expert > 1) * passes / 1e3,
        "10^6 activations between ranks": tokens * model.hidden * travels * passes / 1e6,
    }


def _travels(job: PodJob) -> float:
    """Return how often the hidden state of a token travels in one pass.

    Tensor parallelism gathers and scatters around each half-layer; tokens travel to their experts and back.
    """
    model, layout = job.model, job.layout
    tensor = 4 * model.layers * (layout.tensor - 1)
    if model.experts is None:
        return tensor
    mixtures = model.layers - model.dense_layers
    return tensor + 2 * mixtures * model.experts.top_k * (layout.expert - 1) / layout.expert


def _generation(job: PodJob, beside: float) -> Terms:
    """Count the terms of a step's generation. Engines work at the same time, with their own samples."""
    model = job.model
    mixtures = model.layers - model.dense_layers
    slowed = beside if job.engines > 1 else 1.0
    steps = slowed * (job.response + 1)  # decode steps, and the prompts
    experts = model.experts.count if model.experts else 0
    return {
        "generation": 1.0,
        "request": float(job.samples),
        "sampled token": job.samples * job.response,
        "engine layer": steps * model.layers,
        "engine expert": steps * mixtures * experts,
        "10^9 operations of an engine": slowed * _operations(job, job.samples) / job.engines,
    }


def _operations(job: PodJob, samples: float) -> float:
    """Return 10^9 operations of one forward pass over so many samples."""
    return call_work(job.model, Layout(1), _rows(job, samples), _CORE, 1, 1).flops


def _rows(job: PodJob, samples: float) -> Rows:
    return Rows(1, samples * job.length, job.length / 2)


def _local_tensors(job: PodJob) -> float:
    """Return the tensors of one rank that the optimizer updates."""
    model, layout = job.model, job.layout
    if model.experts is None:
        return float(hf_tensors(model))
    experts = 3 * model.experts.count * (model.layers - model.dense_layers)
    return hf_tensors(model) - experts + experts / layout.expert
