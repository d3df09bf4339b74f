"""Status of GRPOJob, and the status types that both kinds share."""

from dataclasses import fields
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from grpo_operator.api.base import AGENT_RESOURCES, LONGEST_MESSAGE, Model, Resources, ShortString
from grpo_operator.api.v1alpha1.checkpoint_status import CheckpointStatus, MemoryCopiesStatus
from grpo_operator.api.v1alpha1.export_status import ExportStatus
from grpo_operator.api.v1alpha1.goodput import GoodputStatus
from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.api.v1alpha1.offload import OffloadSpec
from grpo_operator.api.v1alpha1.profile_status import MOST_PROFILES, ProfileStatus
from grpo_operator.api.v1alpha1.recompute import Recompute, RecomputeKind, RecomputeModule
from grpo_operator.api.v1alpha1.recovery_status import RecoveryStatus
from grpo_operator.api.v1alpha1.resume_status import ResumedFromStatus, ResumptionStatus

MAX_SICK_NODES = 32  # in a job's status
MAX_STRAGGLERS = 8
MAX_VALIDATION_SETS = 16
MAX_FAILING_NODES = 32
PARKED = "Parked"  # reason of a job whose trainers wait, alive; metrics name it in place of the phase


class Phase(StrEnum):
    """Phase of a job as one word for ``kubectl get``; conditions hold the details.

    INVALID: the spec, or the cluster for it, must change before the job gets pods. WAITING: another object
    must change. PENDING: Kueue has not admitted the job.
    """

    INVALID = "Invalid"
    WAITING = "Waiting"
    PENDING = "Pending"
    STARTING = "Starting"
    TRAINING = "Training"
    RECOVERING = "Recovering"
    SUSPENDING = "Suspending"
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


class EngineState(StrEnum):
    """Lifecycle state of a rollout engine. Every path to SERVING passes through STALE."""

    RESTARTING = "RESTARTING"
    STALE = "STALE"
    SERVING = "SERVING"
    DEAD = "DEAD"


class HostState(StrEnum):
    """State of one host of a multi-host engine."""

    RUNNING = "Running"  # its server runs together with those of the other hosts
    WAITING = "Waiting"  # it runs no server: it waits for the other hosts, or has just started
    LOST = "Lost"  # it does not report


class Condition(Model):
    """A condition, as metav1.Condition."""

    type: str = Field(max_length=64, description="condition type, for example Ready or Degraded")
    status: str = Field(pattern=r"^(True|False|Unknown)$", max_length=8, description="True, False or Unknown")
    reason: str = Field(max_length=64, description="machine-readable cause in CamelCase")
    message: str = Field("", max_length=4096, description="human-readable cause and remedy")
    last_transition_time: str = Field(
        max_length=32, description="time of the last change of status (RFC 3339, UTC)"
    )
    observed_generation: int | None = Field(
        None, description="metadata.generation that the condition describes"
    )


class EngineHostStatus(Model):
    """One pod of an engine of several pods."""

    pod: str = Field(max_length=253, description="name of the pod")
    role: Literal["leader", "worker"] = Field(
        description="leader: host 0, which serves requests and whose agent reports for the engine"
    )
    host: int = Field(description="index of the host within the engine (SGLang: node-rank)")
    state: HostState = Field(description="Running, Waiting for the other hosts, or Lost")


class EngineStatus(Model):
    """State of one engine, reported by its agent."""

    name: str = Field(max_length=253, description="name of the engine's first pod")
    state: EngineState
    weight_version: int | None = Field(None, description="weight version that the engine serves")
    endpoint: str | None = Field(None, max_length=253, description="URL of the engine inside the cluster")
    last_transition: str | None = Field(
        None, max_length=32, description="time of the last state change (RFC 3339, UTC)"
    )
    restarts: int | None = Field(None, description="number of SGLang server losses since the agent started")
    message: str | None = Field(
        None,
        max_length=LONGEST_MESSAGE,
        description="reason for not serving: the last error, or what the engine waits for",
    )
    waits: bool | None = Field(
        None, description="true while the trainer uses the engine's GPUs (mode colocated)"
    )
    hosts: list[EngineHostStatus] | None = Field(
        None, max_length=64, description="pods of an engine of several pods (nodesPerEngine above 1)"
    )


class TokensStatus(Model):
    """Special tokens of the model, read from its files."""

    end: list[int] = Field(max_length=128, description="ids of the tokens that end a response")
    pad: int = Field(description="id of the padding token")
    chat_template: bool = Field(description="true if prompts are formatted with the model's chat template")


class DataStatus(Model):
    """Number of rows in data.train, by what happened to them."""

    rows: int = Field(description="rows used for training")
    too_long: int = Field(0, description="rows skipped because their prompt exceeds promptLength")
    filtered: int = Field(0, description="rows removed by data.filter")
    empty: int = Field(0, description="rows skipped because they have no prompt")


class RestartCounts(Model):
    """Number of restarts by cause. Only ``job`` counts towards maxRestarts."""

    job: int = Field(0, description="restarts after errors of the job itself")
    infrastructure: int = Field(0, description="restarts after losses of pods, nodes or processes")
    rollback: int | None = Field(
        None, description="returns to an older checkpoint, if there were any; see validation.onRegression"
    )


class StragglerStatus(Model):
    """Trainer rank whose own computing is slow; see restartPolicy.stragglers."""

    rank: int = Field(description="number of the rank")
    pod: str = Field(max_length=253, description="name of its pod")
    node: str = Field("", max_length=253, description="name of the pod's node")
    ratio: str = Field(max_length=16, description="its time in relation to the median of its pipeline stage")
    steps: int = Field(description="number of slow steps in a row")


class ValidationStatus(Model):
    """Mean score of a validation set."""

    set: str = Field(max_length=40, description="name of the set")
    step: int = Field(description="last validated step")
    score: str = Field(max_length=16, description="mean score after that step")
    best_step: int = Field(description="step with the best mean score")
    best_score: str = Field(max_length=16, description="best mean score")


class FailingNodeStatus(Model):
    """Node on which training pods or ranks of the job have failed; see restartPolicy.avoidNodes."""

    node: str = Field(max_length=253, description="name of the node")
    failures: int = Field(description="number of failures within restartPolicy.avoidNodes.windowHours")
    message: str = Field("", max_length=LONGEST_MESSAGE, description="reason of the last failure")
    avoided: bool = Field(False, description="true: training pods of this job do not start on the node")


class PoolCount(Model):
    """Number of ready members of a pool: ranks (GPUs) of the training pool, engines of the rollout pool."""

    ready: int = Field(0, description="ready members: ranks in ready pods, or engines that serve")
    total: int = Field(0, description="desired members")


class SpareCount(Model):
    """Number of spare training pods; see trainer.spareNodes."""

    ready: int = Field(0, description="ready training pods beyond trainer.nodes")
    total: int = Field(0, description="trainer.spareNodes")


class PlannedResources(Model):
    """Resources of the pods where the spec sets none. They are kept when a newer operator plans others."""

    controller: Resources
    trainer: Resources
    engine: Resources
    trainer_agent: Resources = Field(AGENT_RESOURCES, description="of the agent in a training pod")
    rollout_agent: Resources = Field(AGENT_RESOURCES, description="of the agent beside an engine")
    shared_memory: str = Field(max_length=16, description="size of /dev/shm in GPU pods")
    routed_experts_gibibytes: int = Field(
        description="memory of each engine pod for routed experts, if the engine returns them"
    )


class PlannedDeadlines(Model):
    """Deadlines where the spec sets none. They are kept when a newer operator plans others."""

    hang_seconds: int = Field(description="of restartPolicy.hangSeconds")
    timeout_seconds: int = Field(description="of weightSync.timeoutSeconds")
    grace_seconds: int | None = Field(
        None, description="of restartPolicy.graceSeconds; not set by releases that knew no such field"
    )


# Whose key the processes of a pod have. Older releases know only that of the namespace.
KeyScope = Literal["owner", "namespace"]


class SettledImages(Model):
    """Images of the operator's settings when the job or pool was accepted. Pods get them until its end."""

    trainer: ShortString = Field(
        description="image of trainers, controller and Ray's head where the spec names none"
    )
    rollout: ShortString = Field(description="image of the engines where the spec names none")
    key_scope: KeyScope = Field(
        "namespace",
        description="whose key the pods have: of their owner, the job or pool; or of the namespace, if an "
        "operator without keys of jobs has accepted the job or pool",
    )


class RecomputeStatus(Model):
    """Recomputation on the ranks, which the operator completed from the spec."""

    kind: RecomputeKind = Field(description="none, selective or full")
    modules: list[RecomputeModule] | None = Field(
        None, max_length=len(RecomputeModule), description="modules of each layer; of kind selective only"
    )
    layers: int | None = Field(
        None, description="number of layers of each pipeline stage, if not all; of kind full only"
    )

    @classmethod
    def of(cls, recompute: Recompute) -> "RecomputeStatus":
        """Return the form in the status."""
        return cls(kind=recompute.kind, modules=list(recompute.modules) or None, layers=recompute.layers)


class LayoutStatus(Model):
    """Parallel layout that the operator computed from the spec."""

    world: int = Field(description="number of trainer ranks")
    data: int = Field(description="data-parallel size (DP)")
    tensor: int = Field(description="tensor-parallel size (TP)")
    pipeline: int = Field(description="pipeline stages (PP)")
    context: int = Field(description="context-parallel size (CP)")
    expert: int = Field(description="expert-parallel size (EP)")
    expert_tensor: int = Field(description="tensor-parallel size of experts (ETP)")
    virtual_pipeline: int = Field(1, description="model chunks per stage (VPP)")
    layers_in_first_stage: int | None = Field(
        None, description="layers of the first stage, if different from the other stages"
    )
    layers_in_last_stage: int | None = Field(
        None, description="layers of the last stage, if different from the other stages"
    )
    stages: list[int] = Field(
        max_length=512, description="number of layers per pipeline stage; empty if the model is unknown"
    )
    bytes_per_gpu: list[int] = Field(
        default_factory=list, max_length=512, description="planned bytes per GPU, for each pipeline stage"
    )
    reason: str = Field(
        "", max_length=1024, description="reason for this layout: given in the spec, or why auto chose it"
    )
    recompute: RecomputeStatus | None = None
    offload: OffloadSpec | None = None
    resources: PlannedResources | None = None
    deadlines: PlannedDeadlines | None = None
    images: SettledImages | None = None

    def layout(self) -> Layout:
        """Return the sizes as a Layout."""
        return Layout(**{size.name: getattr(self, size.name) for size in fields(Layout)})


class GRPOJobStatus(Model):
    """Observed state of the training run."""

    observed_generation: int | None = Field(
        None, description="metadata.generation that this status describes"
    )
    phase: str | None = Field(
        None, max_length=32, description="phase of the job in one word; conditions hold the details"
    )
    reason: str | None = Field(
        None,
        max_length=64,
        description="why the job has no pods, or makes no or slow progress; conditions hold the message",
    )
    step: int | None = Field(None, description="number of finished steps")
    total_steps: int | None = Field(
        None, description="number of steps to train: spec.totalSteps, as soon as the controller follows it"
    )
    progress: str | None = Field(None, max_length=32, description="step/totalSteps, for kubectl get")
    weight_version: int | None = Field(None, description="weight version last sent to the engines")
    reward_mean: str | None = Field(None, max_length=32, description="mean reward of the last step")
    tokens_per_second_per_gpu: str | None = Field(
        None, max_length=32, description="tokens per second and trainer GPU in the last step"
    )
    step_seconds: str | None = Field(None, max_length=32, description="duration of the last step in seconds")
    eta: str | None = Field(
        None, max_length=16, description="time until totalSteps at the pace of the last step, as in 2h05m"
    )
    last_checkpoint: CheckpointStatus | None = None
    memory_copies: MemoryCopiesStatus | None = None
    train: PoolCount | None = None
    spares: SpareCount | None = None
    rollout: PoolCount | None = None
    restarts: RestartCounts | None = None
    restart_count: int | None = Field(None, description="number of restarts of any cause, for kubectl get")
    attempt: int | None = Field(
        None, description="number of starts of the controller or of the training gang"
    )
    last_failure: str | None = Field(
        None, max_length=LONGEST_MESSAGE, description="reason of the last restart"
    )
    next_attempt_at: str | None = Field(
        None,
        max_length=32,
        description="time of the next attempt (RFC 3339, UTC), while the back-off of a restart lasts",
    )
    recent_failures: int | None = Field(
        None,
        description="number of failures, of any cause, that count towards the back-off; a step that is "
        "finished for the first time takes one away",
    )
    backoff_seconds: int | None = Field(
        None,
        description="delay of the next restart if its cause is outside of the job, in seconds; follows from "
        "recentFailures and restartPolicy.backoffSeconds",
    )
    times_parked: int | None = Field(
        None,
        description="number of times that the trainers were parked: they waited, alive, because too "
        "few engines served, or the reward or room in the store was away",
    )
    parked_since: str | None = Field(
        None, max_length=32, description="time since which the trainers are parked (RFC 3339, UTC)"
    )
    progressed_at: str | None = Field(
        None,
        max_length=32,
        description="time at which the job entered its phase, or finished a step in it (RFC 3339, UTC)",
    )
    resumed_from: ResumedFromStatus | None = None
    resumption: ResumptionStatus | None = None
    layout: LayoutStatus | None = None
    weight_path: str | None = Field(
        None,
        max_length=64,
        description="path of new weights into the engines, resolved from spec.weightSync: backend of direct "
        "transfers, then the path of staged versions",
    )
    network: str | None = Field(
        None,
        max_length=LONGEST_MESSAGE,
        description="network that NCCL uses between the trainers: its name (IB, Socket or a plugin's), its "
        "devices, and the transports within hosts",
    )
    goodput: GoodputStatus | None = None
    last_recovery: RecoveryStatus | None = None
    started_at: str | None = Field(None, max_length=32, description="start time (RFC 3339, UTC)")
    finished_at: str | None = Field(None, max_length=32, description="end time (RFC 3339, UTC)")
    conditions: list[Condition] = Field(
        default_factory=list,
        max_length=16,
        description="conditions such as Ready, Progressing and Degraded, each with a reason",
    )
    train_ready: str | None = Field(
        None,
        max_length=16,
        description="train.ready/train.total, and +spares.ready if the job has spares, for kubectl get",
    )
    rollout_ready: str | None = Field(
        None, max_length=16, description="rollout.ready/rollout.total, for kubectl get"
    )
    weights: str | None = Field(
        None, max_length=16, description="weightVersion as v0, v1, ..., for kubectl get"
    )
    tokens: TokensStatus | None = None
    data: DataStatus | None = None
    profiles: list[ProfileStatus] | None = Field(
        None,
        max_length=MOST_PROFILES,
        description="profiles that were requested by the annotation rl.grpo.dev/profile, oldest first",
    )
    export: ExportStatus | None = None
    stragglers: list[StragglerStatus] | None = Field(
        None, max_length=MAX_STRAGGLERS, description="ranks that are slow now, the slowest first"
    )
    validation: list[ValidationStatus] | None = Field(
        None, max_length=MAX_VALIDATION_SETS, description="scores of the validation sets"
    )
    failing_nodes: list[FailingNodeStatus] | None = Field(
        None,
        max_length=MAX_FAILING_NODES,
        description="nodes on which training pods or ranks of this job have failed, those with the most "
        "failures first; a new value of the annotation rl.grpo.dev/forget-nodes clears the list",
    )
    sick_nodes: list[Annotated[str, Field(max_length=512)]] | None = Field(
        None, max_length=MAX_SICK_NODES, description="nodes that lost pods of this job to a sick GPU, and why"
    )
