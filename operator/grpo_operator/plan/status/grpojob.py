"""Computes the status of a GRPOJob (pure)."""

from dataclasses import replace
from typing import Any

from grpo_operator.api import names
from grpo_operator.api.base import LONGEST_MESSAGE
from grpo_operator.api.messages import ControllerStatus
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.recovery_status import RecoveryStatus
from grpo_operator.api.v1alpha1.resume_status import ResumedFromStatus
from grpo_operator.api.v1alpha1.rolloutpool import RolloutTemplate
from grpo_operator.api.v1alpha1.status import (
    MAX_SICK_NODES,
    GRPOJobStatus,
    LayoutStatus,
    Phase,
    PoolCount,
    RecomputeStatus,
    RestartCounts,
    SpareCount,
)
from grpo_operator.plan import resumption
from grpo_operator.plan.accepted import note_unknown_fields
from grpo_operator.plan.lifecycle import is_terminal
from grpo_operator.plan.observed import Observed
from grpo_operator.plan.planner.resolve import JobPlan
from grpo_operator.plan.status.checkpoints import checkpoint_statuses
from grpo_operator.plan.status.conditions import NO_PROBLEM, Conditions, Problem
from grpo_operator.plan.status.engine_start import engine_start_failure
from grpo_operator.plan.status.goodput import goodput_status
from grpo_operator.plan.status.phase_times import parked_since, progressed_at
from grpo_operator.plan.status.problems import cause_of_end, problem_of
from grpo_operator.plan.status.profiles import profile_statuses
from grpo_operator.plan.status.remaining import remaining, total_steps
from grpo_operator.plan.status.stragglers import straggler_statuses
from grpo_operator.plan.status.validation import validation_statuses
from grpo_operator.plan.weight_path import job_weight_path


def refused_status(
    job: dict[str, Any], reason: str, message: str, now: str, waits: bool = False
) -> GRPOJobStatus:
    """Return the status of a job that gets no pods: it is invalid, infeasible, or (``waits``) has to wait.

    The progress of a job that ran before is kept, because the job resumes from there.
    """
    generation = job["metadata"]["generation"]
    conditions = Conditions(_old(job).get("conditions") or [], generation, now)
    conditions.set("Ready", False, reason, message)
    conditions.set("Progressing", False, reason, message)
    conditions.set("Degraded", False, reason)
    conditions.set("Suspended", False, reason)
    conditions.set("Succeeded", False, reason)
    conditions.set("Failed", False, reason)
    conditions.set("Reconciling", waits, reason, message if waits else "")
    conditions.set("Stalled", not waits, reason, "" if waits else message)
    old, phase = GRPOJobStatus.of_any_release(_old(job)), Phase.WAITING if waits else Phase.INVALID
    return old.model_copy(
        update={
            "observed_generation": generation,
            "phase": phase,
            "progressed_at": progressed_at(old, phase, old.step, now),
            "parked_since": None,
            "reason": reason,
            "eta": None,
            "train": None,
            "spares": None,
            "rollout": None,
            "train_ready": None,
            "rollout_ready": None,
            "conditions": conditions.result(),
        }
    )


def job_status(
    job: dict[str, Any],
    spec: GRPOJobSpec,
    layout: LayoutStatus,
    pool: RolloutTemplate,
    observed: Observed,
    now: str,
    blocked: Problem = NO_PROBLEM,
    source: ResumedFromStatus | None = None,
) -> GRPOJobStatus:
    """Return the status of a job that runs, is suspended or has ended.

    ``pool``: the job's own rollout pool, or the shared one that it uses.
    ``blocked``: why its children cannot be applied. ``source``: of checkpoint.resumeFrom.
    Fields that only a newer operator knows are kept: it may be back soon.
    """
    old = GRPOJobStatus.of_any_release(_old(job))
    resumes = resumption.begins(job, spec, observed)
    if resumes:
        observed = replace(observed, controller=None)  # its last report is that of the end
    phase, message = _phase(job, spec, observed, resumes)
    problem = problem_of(phase, observed)
    cause = cause_of_end(phase, observed, _condition(_old(job), "Failed"))
    train, spares = _ranks(spec, observed), _spares(spec, observed)
    rollout = PoolCount(ready=observed.ready(names.ROLLOUT), total=pool.replicas)
    values = _from_controller(old, observed.controller, now)
    total = total_steps(spec, old, observed.controller, resumes)
    ended = phase in (Phase.SUCCEEDED, Phase.FAILED)
    path = str(job_weight_path(spec, pool))
    if is_terminal(_old(job)):  # a shared pool may have been deleted since
        path = old.weight_path or path
    status = old.model_copy(
        update=values
        | {
            "observed_generation": job["metadata"]["generation"],
            "phase": phase,
            "reason": blocked.reason or problem.reason or cause or None,
            "progressed_at": progressed_at(old, phase, values["step"], now),
            "parked_since": parked_since(old, phase, observed.controller, now),
            "eta": remaining(total, observed.controller) if phase == Phase.TRAINING else None,
            "total_steps": total,
            "progress": f"{values['step'] or 0}/{total}",
            "train": train,
            "spares": spares,
            "rollout": rollout,
            "train_ready": f"{train.ready}/{train.total}" + (f" +{spares.ready}" if spares else ""),
            "rollout_ready": f"{rollout.ready}/{rollout.total}",
            "layout": layout,
            "weight_path": path,
            "goodput": goodput_status(old.goodput, spec, observed.controller),
            "last_recovery": _recovery(old, observed.controller),
            "stragglers": straggler_statuses(observed) or None,
            "validation": validation_statuses(old.validation, observed.controller),
            "failing_nodes": list(observed.failing_nodes) or None,
            "sick_nodes": list(observed.sick_nodes[:MAX_SICK_NODES]) or None,
            "started_at": old.started_at or now,
            "finished_at": (old.finished_at or now) if ended else None,
            "profiles": profile_statuses(job, spec, old.profiles, observed.controller, ended, now),
            "resumed_from": _resumed_from(source or old.resumed_from, observed.controller),
            "resumption": resumption.resumption_status(job, spec, resumes, now),
        }
    )
    if resumes and old.phase == Phase.FAILED:
        status = status.model_copy(
            update={"last_failure": _message_of(_old(job), "Failed")[:LONGEST_MESSAGE]}
        )
    conditions = _conditions(job, phase, message, status, now, blocked, problem, cause)
    note_unknown_fields(conditions, spec)
    return status.model_copy(update={"conditions": conditions.result()})


def layout_status(plan: JobPlan) -> LayoutStatus:
    """Return the plan in the form of status.layout."""
    layout = plan.layout
    return LayoutStatus(
        world=layout.world,
        data=layout.data,
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        context=layout.context,
        expert=layout.expert,
        expert_tensor=layout.expert_tensor,
        virtual_pipeline=layout.virtual_pipeline,
        layers_in_first_stage=layout.layers_in_first_stage,
        layers_in_last_stage=layout.layers_in_last_stage,
        stages=[stage.layers for stage in plan.stages],
        bytes_per_gpu=[stage.total for stage in plan.stages],
        reason=plan.reason,
        recompute=RecomputeStatus.of(plan.recompute),
        offload=plan.offload,
        resources=plan.resources,
        deadlines=plan.deadlines,
    )


def settled_layout(job: dict[str, Any]) -> LayoutStatus | None:
    """Return the layout from the job's status, or None.

    A layout is chosen once: checkpoints and pods depend on it, so a newer planner must not change it.
    """
    seen = _old(job).get("layout")
    return LayoutStatus.of_any_release(seen) if seen else None


def _ranks(spec: GRPOJobSpec, observed: Observed) -> PoolCount:
    trainer = spec.trainer
    pods = min(observed.ready(names.TRAINER), trainer.nodes)
    return PoolCount(ready=pods * trainer.gpus_per_node, total=trainer.world)


def _spares(spec: GRPOJobSpec, observed: Observed) -> SpareCount | None:
    """Return the training pods beyond those that the ranks need; None for a job without spares."""
    if not spec.trainer.spare_nodes:
        return None
    more = observed.ready(names.TRAINER) - spec.trainer.nodes
    return SpareCount(ready=max(more, 0), total=spec.trainer.spare_nodes)


def _old(job: dict[str, Any]) -> dict[str, Any]:
    return job.get("status") or {}


def _resumed_from(
    source: ResumedFromStatus | None, controller: ControllerStatus | None
) -> ResumedFromStatus | None:
    if source is None or controller is None or not controller.resumed_from:
        return source
    return source.model_copy(update={"checkpoint": controller.resumed_from})


def _recovery(old: GRPOJobStatus, controller: ControllerStatus | None) -> RecoveryStatus | None:
    if controller is None or controller.last_recovery is None:
        return old.last_recovery
    return RecoveryStatus(**controller.last_recovery.model_dump())


def _phase(job: dict[str, Any], spec: GRPOJobSpec, observed: Observed, resumes: bool) -> tuple[Phase, str]:
    old = _old(job)
    if is_terminal(old) and not resumes:
        return Phase(old["phase"]), _message_of(old, old["phase"])
    controller, cluster = observed.controller, observed.ray_cluster
    if controller and controller.phase in (Phase.SUCCEEDED, Phase.FAILED):
        return controller.phase, controller.message
    if spec.suspend:
        gone = cluster is not None and cluster.suspended and not observed.pods
        if gone or (cluster is None and not observed.pods):
            return Phase.SUSPENDED, "all pods are deleted; set spec.suspend to false to resume"
        return Phase.SUSPENDING, "saving a checkpoint, then deleting the pods"
    if spec.scheduling.queue_name and cluster is not None and cluster.suspended:
        return Phase.PENDING, f"queued in {spec.scheduling.queue_name}: Kueue has not admitted the job yet"
    failure = engine_start_failure(spec, observed, old)
    if failure:
        return Phase.FAILED, failure
    if controller:
        phase = controller.phase
        if phase == Phase.STARTING and old.get("step"):
            phase = Phase.RECOVERING
        return (Phase.STARTING if phase == Phase.SUSPENDED else phase), controller.message
    if old.get("step"):
        return Phase.RECOVERING, "the controller pod is starting; it resumes from the last checkpoint"
    return Phase.STARTING, "pods are starting"


def _condition(status: dict[str, Any], kind: str) -> dict[str, Any]:
    return next((c for c in status.get("conditions") or [] if c["type"] == kind), {})


def _message_of(status: dict[str, Any], kind: str) -> str:
    return str(_condition(status, kind).get("message", ""))


def _from_controller(old: GRPOJobStatus, controller: ControllerStatus | None, now: str) -> dict[str, Any]:
    """Return the status fields that the controller reports.

    A field that the controller does not know yet keeps its old value.
    """
    if controller is None:
        return {"step": old.step}
    version, reward = controller.weight_version, controller.reward_mean
    speed, seconds = controller.tokens_per_second_per_gpu, controller.step_seconds
    # A controller that has just started has not read the run's record yet, and then has restored no step.
    restored = controller.attempt and controller.restored is not None
    values: dict[str, Any] = {"step": controller.step if restored else old.step}
    if controller.attempt:
        values["attempt"] = controller.attempt
    known = controller.attempt or controller.restarts != RestartCounts()
    restarts = controller.restarts if known else old.restarts or controller.restarts
    count = restarts.job + restarts.infrastructure + (restarts.rollback or 0)
    values |= {"restarts": restarts, "restart_count": count}
    if known:
        values |= {
            "times_parked": controller.times_parked,
            "recent_failures": controller.recent_failures,
            "backoff_seconds": controller.backoff_seconds,
            "next_attempt_at": controller.next_attempt or None,
        }
    if known and controller.last_failure:
        values["last_failure"] = controller.last_failure[:LONGEST_MESSAGE]
    if controller.tokens:
        values["tokens"] = controller.tokens
    if controller.data:
        values["data"] = controller.data
    if controller.network:
        values["network"] = controller.network[:LONGEST_MESSAGE]
    if version is not None:
        values |= {"weight_version": version, "weights": f"v{version}"}
    if reward is not None:
        values["reward_mean"] = f"{reward:.3f}"
    if speed is not None:
        values["tokens_per_second_per_gpu"] = f"{speed:.1f}"
    if seconds is not None:
        values["step_seconds"] = f"{seconds:.1f}"
    return values | checkpoint_statuses(old, controller, now)


def _conditions(
    job: dict[str, Any], phase: Phase, message: str, status: GRPOJobStatus, now: str,
    blocked: Problem, problem: Problem, cause: str,
) -> Conditions:  # fmt: skip
    generation = job["metadata"]["generation"]
    conditions = Conditions(_old(job).get("conditions") or [], generation, now)
    running = phase == Phase.TRAINING
    pools = {"ranks": status.train, "engines": status.rollout, "spare training pods": status.spares}
    counts = {name: pool for name, pool in pools.items() if pool is not None}
    whole = all(pool.ready == pool.total for pool in counts.values())
    degraded = phase == Phase.RECOVERING or (running and not whole) or bool(problem.reason)
    counted = ", ".join(f"{name} {pool.ready}/{pool.total}" for name, pool in counts.items())
    changing = phase in (Phase.PENDING, Phase.STARTING, Phase.RECOVERING, Phase.SUSPENDING)
    # A single failing container does not stop a training job; a lack of samples does.
    starved = problem.reason in ("NoSamples", "Parked")
    text = message if running and not starved else problem.message or message
    ready = (running and not starved) or phase == Phase.SUCCEEDED
    conditions.set("Ready", ready, problem.reason if starved else phase, text)
    conditions.set("Progressing", changing or running, phase, text)
    reason = problem.reason or ("PoolsIncomplete" if degraded else "PoolsWhole")
    text = "; ".join(filter(None, (problem.message, counted)))
    conditions.set("Degraded", degraded, reason, text if degraded else "")
    for kind, value in (
        ("Suspended", phase == Phase.SUSPENDED),
        ("Succeeded", phase == Phase.SUCCEEDED),
        ("Failed", phase == Phase.FAILED),
        ("Reconciling", changing),
    ):
        conditions.set(kind, value, cause if kind == "Failed" and cause else phase, message if value else "")
    stalled = bool(blocked.reason) or phase == Phase.FAILED
    conditions.set(
        "Stalled", stalled, blocked.reason or cause or phase, (blocked.message or message) if stalled else ""
    )
    return conditions
