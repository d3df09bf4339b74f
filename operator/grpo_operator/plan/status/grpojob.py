"""Status of a GRPOJob from what is observed (pure)."""

from typing import Any, NamedTuple

from grpo_operator.api import names
from grpo_operator.api.errors import cause_of
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.status import (
    CheckpointStatus,
    DataStatus,
    GRPOJobStatus,
    LayoutStatus,
    Phase,
    PoolCount,
    RestartCounts,
    TokensStatus,
)
from grpo_operator.plan.lifecycle import is_terminal
from grpo_operator.plan.observed import Observed
from grpo_operator.plan.planner.resolve import JobPlan
from grpo_operator.plan.status.conditions import Conditions
from grpo_operator.plan.status.container_failures import container_failures

_MOST_FAILURES = 3


def refused_status(
    job: dict[str, Any], reason: str, message: str, now: str, waits: bool = False
) -> GRPOJobStatus:
    """Status of a job that gets no pod: invalid, infeasible on this cluster, or (``waits``) not yet.

    What a job that ran before has reached stays: it goes on from there.
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
    return GRPOJobStatus.model_validate(_old(job)).model_copy(
        update={
            "observed_generation": generation,
            "phase": Phase.PENDING,
            "train": None,
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
    rollout_replicas: int,
    observed: Observed,
    now: str,
    blocked: str = "",
) -> GRPOJobStatus:
    """Status of a job that runs, is suspended, or ended. ``blocked``: why its children cannot be applied."""
    old = GRPOJobStatus.model_validate(_old(job))
    phase, message = _phase(job, spec, observed)
    hindrance = _hindrance(phase, observed)
    train = _ranks(spec, observed)
    rollout = PoolCount(ready=observed.ready(names.ROLLOUT), total=rollout_replicas)
    values = _from_controller(old, observed.progress)
    ended = phase in (Phase.SUCCEEDED, Phase.FAILED)
    status = old.model_copy(
        update=values
        | {
            "observed_generation": job["metadata"]["generation"],
            "phase": phase,
            "total_steps": spec.total_steps,
            "progress": f"{values['step'] or 0}/{spec.total_steps}",
            "train": train,
            "rollout": rollout,
            "train_ready": f"{train.ready}/{train.total}",
            "rollout_ready": f"{rollout.ready}/{rollout.total}",
            "layout": layout,
            "started_at": old.started_at or now,
            "finished_at": (old.finished_at or now) if ended else None,
        }
    )
    conditions = _conditions(job, phase, message, train, rollout, now, blocked, hindrance)
    return status.model_copy(update={"conditions": conditions})


def layout_status(plan: JobPlan) -> LayoutStatus:
    """The plan as users see it in status."""
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
    )


def settled_layout(job: dict[str, Any]) -> LayoutStatus | None:
    """The layout in the job's status: it stays, whatever a newer planner would say."""
    seen = _old(job).get("layout")
    return LayoutStatus.model_validate(seen) if seen else None


def _ranks(spec: GRPOJobSpec, observed: Observed) -> PoolCount:
    each = spec.trainer.gpus_per_node
    return PoolCount(ready=observed.ready(names.TRAINER) * each, total=spec.trainer.world)


def _old(job: dict[str, Any]) -> dict[str, Any]:
    return job.get("status") or {}


def _phase(job: dict[str, Any], spec: GRPOJobSpec, observed: Observed) -> tuple[Phase, str]:
    old = _old(job)
    if is_terminal(old):
        return Phase(old["phase"]), _message_of(old, old["phase"])
    progress, cluster = observed.progress, observed.ray_cluster
    if progress and progress["phase"] in (Phase.SUCCEEDED, Phase.FAILED):
        return Phase(progress["phase"]), progress["message"]
    if spec.suspend:
        gone = cluster is not None and cluster.suspended and not observed.pods
        if gone or (cluster is None and not observed.pods):
            return Phase.SUSPENDED, "all pods are released; set spec.suspend to false to resume"
        return Phase.SUSPENDING, "waiting for a checkpoint and for the pods to end"
    if spec.scheduling.queue_name and cluster is not None and cluster.suspended:
        return Phase.PENDING, f"queued in {spec.scheduling.queue_name}: Kueue has not given the quota yet"
    hopeless = hopeless_engines(spec, observed, old)
    if hopeless:
        return Phase.FAILED, hopeless
    if progress:
        phase = Phase(progress["phase"])
        if phase == Phase.STARTING and old.get("step"):
            phase = Phase.RECOVERING
        return (Phase.STARTING if phase == Phase.SUSPENDED else phase), progress["message"]
    if old.get("step"):
        return Phase.RECOVERING, "the controller pod is starting; it resumes from the last checkpoint"
    return Phase.STARTING, "pods are starting"


class Hindrance(NamedTuple):
    """Why a job that should run does not get on as it should. ``reason``: NoSamples, ContainersFailing or
    nothing."""

    reason: str = ""
    message: str = ""


def _hindrance(phase: Phase, observed: Observed) -> Hindrance:
    if phase not in (Phase.STARTING, Phase.TRAINING, Phase.RECOVERING):
        return Hindrance()
    stalled = (observed.progress or {}).get("stalled")
    if stalled:
        return Hindrance("NoSamples", stalled)
    failures = "; ".join(failure.text for failure in observed.container_failures()[:_MOST_FAILURES])
    return Hindrance("ContainersFailing", failures) if failures else Hindrance()


def hopeless_engines(spec: GRPOJobSpec, observed: Observed, old: dict[str, Any]) -> str:
    """Why no engine of the job's own pool will ever serve, or nothing.

    Every engine that has a node has ended ``restartPolicy.maxSameFailures`` times, now with the same kind of
    error, and none has ever served: what is wrong is in the job, not in a node.
    """
    if spec.rollout.template is None or old.get("weightVersion") is not None:
        return ""
    placed = [pod for pod in observed.engine_pods() if pod.get("spec", {}).get("nodeName")]
    least = spec.restart_policy.max_same_failures
    found = [failure for failure in container_failures(placed) if failure.restarts >= least]
    kinds = {cause_of(failure.error).split(":")[0] for failure in found}
    if not placed or len({failure.pod for failure in found}) < len(placed) or len(kinds) > 1:
        return ""
    return f"no engine has come up: {found[0].text}"


def _message_of(status: dict[str, Any], kind: str) -> str:
    found = [c["message"] for c in status.get("conditions") or [] if c["type"] == kind]
    return str(found[0]) if found else ""


def _from_controller(old: GRPOJobStatus, progress: dict[str, Any] | None) -> dict[str, Any]:
    """Figures of the controller; the last known ones while it cannot be reached."""
    if progress is None:
        return {"step": old.step}
    version, reward = progress["weight_version"], progress["reward_mean"]
    speed, checkpoint = progress["tokens_per_second_per_gpu"], progress["last_checkpoint"]
    if not progress["attempt"]:  # a controller that has just started has not read yet how far the job is
        values: dict[str, Any] = {"step": old.step}
    else:
        values = {"step": progress["step"], "attempt": progress["attempt"]}
    restarts = RestartCounts(**progress["restarts"])
    known = progress["attempt"] or restarts != RestartCounts()
    values["restarts"] = restarts if known else old.restarts or restarts
    if progress.get("tokens"):
        values["tokens"] = TokensStatus.model_validate(progress["tokens"])
    if progress.get("data"):
        values["data"] = DataStatus.model_validate(progress["data"])
    if version is not None:
        values |= {"weight_version": version, "weights": f"v{version}"}
    if reward is not None:
        values |= {"reward_mean": f"{reward:.3f}", "tokens_per_second_per_gpu": f"{speed:.1f}"}
    if checkpoint is not None:
        location = f"{progress['checkpoint_location']}/step-{checkpoint:08d}"
        values["last_checkpoint"] = CheckpointStatus(step=checkpoint, location=location, complete=True)
    return values


def _conditions(
    job: dict[str, Any], phase: Phase, message: str, train: PoolCount, rollout: PoolCount, now: str,
    blocked: str, hindrance: Hindrance,
) -> list[Any]:  # fmt: skip
    generation = job["metadata"]["generation"]
    conditions = Conditions(_old(job).get("conditions") or [], generation, now)
    running = phase == Phase.TRAINING
    whole = rollout.ready == rollout.total and train.ready == train.total
    degraded = phase == Phase.RECOVERING or (running and not whole) or bool(hindrance.reason)
    pools = f"ranks {train.ready}/{train.total}, engines {rollout.ready}/{rollout.total}"
    changing = phase in (Phase.PENDING, Phase.STARTING, Phase.RECOVERING, Phase.SUSPENDING)
    starved = hindrance.reason == "NoSamples"  # one engine of many that fails holds nothing up
    said = message if running and not starved else hindrance.message or message
    ready = (running and not starved) or phase == Phase.SUCCEEDED
    conditions.set("Ready", ready, hindrance.reason if starved else phase, said)
    conditions.set("Progressing", changing or running, phase, said)
    reason = hindrance.reason or ("PoolsIncomplete" if degraded else "PoolsWhole")
    text = "; ".join(filter(None, (hindrance.message, pools)))
    conditions.set("Degraded", degraded, reason, text if degraded else "")
    for kind, value in (
        ("Suspended", phase == Phase.SUSPENDED),
        ("Succeeded", phase == Phase.SUCCEEDED),
        ("Failed", phase == Phase.FAILED),
        ("Reconciling", changing),
    ):
        conditions.set(kind, value, phase, message if value else "")
    stalled = bool(blocked) or phase == Phase.FAILED
    reason = "ApplyRefused" if blocked else phase
    conditions.set("Stalled", stalled, reason, (blocked or message) if stalled else "")
    return conditions.result()
