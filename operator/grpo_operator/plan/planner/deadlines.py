"""Deadlines of a job where its spec sets none, and the least that a spec may set (pure).

A deadline ends a wait without progress. It must be long beside the largest unit of work that reports progress
once: for a rank, the passes of one micro-batch with the reduction of gradients; for a transfer, one wave.
"""

import math
from dataclasses import dataclass

from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.api.v1alpha1.model import TIMEOUT_SECONDS
from grpo_operator.api.v1alpha1.restart_policy import GRACE_SECONDS, HANG_SECONDS
from grpo_operator.api.v1alpha1.rolloutpool import RolloutTemplate
from grpo_operator.api.v1alpha1.status import PlannedDeadlines
from grpo_operator.plan.planner.efficiency import HOST_RATE, MEASURED
from grpo_operator.plan.planner.training.cost import Rows, call_cost, passes_of_update
from grpo_operator.plan.planner.training.search import TrainingPool

_FACTOR = 8  # of a planned deadline beside the estimated unit: a slow rank or a first call takes longer
_LEAST = 2  # of a deadline that a spec sets
_ROUNDED = 30  # seconds
_GRACE = 1.5  # of the planned grace beside the estimated update and save
_STORE_RATE = 1e9  # bytes/s of one node to the checkpoint store (assumed)


@dataclass(frozen=True, slots=True)
class LongestUnits:
    """Seconds between two signs of progress, estimated. ``rank``: of the gang. ``wave``: of a link.

    ``leave``: until the trainers have finished an update that has begun, and have saved it.
    """

    rank: float
    wave: float
    leave: float = 0.0


def longest_units(
    spec: GRPOJobSpec, pool: RolloutTemplate, training: TrainingPool, layout: Layout
) -> LongestUnits:
    """Return the longest units of a job on GPUs whose model is known."""
    rank = max(_rank_seconds(training, layout), _log_prob_seconds(training, layout))
    return LongestUnits(rank, _wave_seconds(spec, pool, training), _leave_seconds(spec, training, layout))


def planned_deadlines(units: LongestUnits | None) -> PlannedDeadlines:
    """Return the deadlines of a job whose spec sets none. ``units``: None if they are not known."""
    if units is None:
        return PlannedDeadlines(
            hang_seconds=HANG_SECONDS, timeout_seconds=TIMEOUT_SECONDS, grace_seconds=GRACE_SECONDS
        )
    return PlannedDeadlines(
        hang_seconds=max(_rounded(_FACTOR * units.rank), HANG_SECONDS),
        timeout_seconds=max(_rounded(_FACTOR * units.wave), TIMEOUT_SECONDS),
        grace_seconds=max(_rounded(_GRACE * units.leave), GRACE_SECONDS),
    )


def deadline_problems(spec: GRPOJobSpec, units: LongestUnits) -> list[str]:
    """Return what is wrong with the deadlines of the spec, with field, value and remedy."""
    hang, timeout = spec.restart_policy.hang_seconds, spec.weight_sync.timeout_seconds
    problems = []
    if hang is not None and hang < _LEAST * units.rank:
        problems.append(
            f"spec.restartPolicy.hangSeconds: {hang} s are too short for the passes of one micro-batch, "
            f"which take about {units.rank:.0f} s: leave it out, set at least "
            f"{math.ceil(_LEAST * units.rank)}, or lower trainer.maxTokensPerGpu, "
            "logProbMaxTokensPerGpu, microBatchSizePerGpu or logProbMicroBatchSizePerGpu"
        )
    if timeout is not None and timeout < _LEAST * units.wave:
        problems.append(
            f"spec.weightSync.timeoutSeconds: {timeout} s are too short for one wave, which takes about "
            f"{units.wave:.1f} s: leave it out, set at least {math.ceil(_LEAST * units.wave)}, or lower "
            "weightSync.bucketMegabytes"
        )
    return problems


def completed_deadlines(spec: GRPOJobSpec, planned: PlannedDeadlines) -> GRPOJobSpec:
    """Return the spec with the planned deadlines where it sets none."""
    restart, sync = spec.restart_policy, spec.weight_sync
    hang = restart.hang_seconds or planned.hang_seconds
    timeout = sync.timeout_seconds or planned.timeout_seconds
    grace = restart.grace_seconds or planned.grace_seconds
    return spec.model_copy(
        update={
            "restart_policy": restart.model_copy(update={"hang_seconds": hang, "grace_seconds": grace}),
            "weight_sync": sync.model_copy(update={"timeout_seconds": timeout}),
        }
    )


def _rank_seconds(training: TrainingPool, layout: Layout) -> float:
    """Return the seconds of all passes of the largest micro-batch, and of the reduction of gradients."""
    full = training.sequence * training.micro_batch
    tokens = full if training.max_tokens is None else training.max_tokens * layout.context
    packed = 0.0 if training.max_tokens is None else max(tokens / training.sequence, 1.0)
    rows = Rows(1, tokens, training.sequence / 2, packed)
    cost = call_cost(
        training.model,
        layout,
        rows,
        training.gpu,
        training.gpus_per_node,
        passes=passes_of_update(training.model, layout, rows, training.recompute),
        gradients=True,
        efficiency=training.efficiency,
        offloaded=tuple(training.offload.activations or ()),
    )
    return cost.total - cost.bubble


def _log_prob_seconds(training: TrainingPool, layout: Layout) -> float:
    """Return the seconds of the largest pass without gradients; 0: it has the update's size."""
    tokens = training.log_prob_tokens(layout)
    if tokens is None:
        return 0.0
    packed = 0.0 if training.max_tokens is None else max(tokens / training.sequence, 1.0)
    rows = Rows(1, tokens, training.sequence / 2, packed)
    cost = call_cost(training.model, layout, rows, training.gpu, training.gpus_per_node, passes=1)
    return cost.total - cost.bubble


def _wave_seconds(spec: GRPOJobSpec, pool: RolloutTemplate, training: TrainingPool) -> float:
    """Return the seconds in which every engine rank receives a bucket, as all trainer ranks can send them."""
    receivers = pool.replicas * pool.engine.tensor_parallel
    bucket = spec.weight_sync.bucket_megabytes * 2**20
    rate = training.gpu.network * MEASURED.link
    return bucket * max(receivers / training.world, 1.0) / rate


def _leave_seconds(spec: GRPOJobSpec, training: TrainingPool, layout: Layout) -> float:
    """Return the seconds of a step's update, with full sequences, and of a checkpoint.

    An update cannot be interrupted: between its optimizer steps the weights belong to no step.
    """
    steps = math.ceil(spec.data.train_batch_size / spec.trainer.mini_batch_size)
    saved = max(stage.saved for stage in training.memory(layout))
    save = saved / HOST_RATE + saved * training.gpus_per_node / _STORE_RATE
    return steps * training.cost(layout).total + save


def _rounded(seconds: float) -> int:
    return _ROUNDED * math.ceil(seconds / _ROUNDED)
