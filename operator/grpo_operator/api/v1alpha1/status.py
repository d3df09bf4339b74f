"""Status vocabulary shared by both kinds."""

from enum import StrEnum

from pydantic import Field

from grpo_operator.api.base import Model
from grpo_operator.api.v1alpha1.layout import Layout

LONGEST_MESSAGE = 1024  # characters that are kept of what an engine says


class Phase(StrEnum):
    """One word for ``kubectl get``; the conditions say more."""

    PENDING = "Pending"
    STARTING = "Starting"
    TRAINING = "Training"
    RECOVERING = "Recovering"
    SUSPENDING = "Suspending"
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


class EngineState(StrEnum):
    """Life of one rollout engine. No edge skips STALE on the way to SERVING."""

    RESTARTING = "RESTARTING"
    STALE = "STALE"
    SERVING = "SERVING"
    DEAD = "DEAD"


class Condition(Model):
    """metav1.Condition."""

    type: str = Field(max_length=64, description="what it is about")
    status: str = Field(pattern=r"^(True|False|Unknown)$", max_length=8, description="True, False or Unknown")
    reason: str = Field(max_length=64, description="CamelCase, for programs")
    message: str = Field("", max_length=4096, description="for people: what to do")
    last_transition_time: str = Field(max_length=32, description="when status changed; RFC 3339, UTC")
    observed_generation: int | None = Field(None, description="metadata.generation that it is of")


class EngineStatus(Model):
    """One engine as its sidecar reports it."""

    name: str = Field(max_length=253, description="its first pod")
    state: EngineState
    weight_version: int | None = Field(None, description="version that it serves")
    endpoint: str | None = Field(None, max_length=253, description="URL inside the cluster")
    last_transition: str | None = Field(None, max_length=32, description="of the state; RFC 3339, UTC")
    restarts: int | None = Field(None, description="times that the server was lost, seen by this sidecar")
    message: str | None = Field(
        None,
        max_length=LONGEST_MESSAGE,
        description="why it does not serve: its last error, or what it waits for",
    )
    waits: bool | None = Field(None, description="its GPUs are the trainers' for now (mode colocated)")


class CheckpointStatus(Model):
    """The newest complete checkpoint."""

    step: int = Field(description="finished steps that it holds")
    location: str = Field(max_length=1024, description="folder, as the pods see it")
    complete: bool = Field(description="its commit marker is there")


class TokensStatus(Model):
    """Special tokens of the model, as its own files name them."""

    end: list[int] = Field(max_length=128, description="tokens that end an answer")
    pad: int = Field(description="token that fills rows up; never seen by the model")
    chat_template: bool = Field(description="prompts go through the model's chat template")


class DataStatus(Model):
    """Rows of data.train."""

    rows: int = Field(description="that are trained on")
    too_long: int = Field(0, description="left out: their prompt exceeds promptLength")
    filtered: int = Field(0, description="left out by data.filter")
    empty: int = Field(0, description="left out: without a prompt")


class RestartCounts(Model):
    """Restarts by cause. ``job`` counts towards maxRestarts, ``infrastructure`` does not."""

    job: int = Field(0, description="errors of the job itself")
    infrastructure: int = Field(0, description="lost pods, nodes and processes")


class PoolCount(Model):
    """Of the training pool, ranks (GPUs) in ready pods; of the rollout pool, ready engines."""

    ready: int = Field(0, description="that are ready")
    total: int = Field(0, description="that are wanted")


class LayoutStatus(Model):
    """The layout that the operator computed from the spec."""

    world: int = Field(description="trainer ranks")
    data: int = Field(description="data-parallel size (DP)")
    tensor: int = Field(description="tensor-parallel size (TP)")
    pipeline: int = Field(description="pipeline stages (PP)")
    context: int = Field(description="context-parallel size (CP)")
    expert: int = Field(description="expert-parallel size (EP)")
    expert_tensor: int = Field(description="tensor-parallel size of experts (ETP)")
    virtual_pipeline: int = Field(1, description="model chunks of each stage (VPP)")
    layers_in_first_stage: int | None = Field(None, description="when it differs from the others")
    layers_in_last_stage: int | None = Field(None, description="when it differs from the others")
    stages: list[int] = Field(
        max_length=512, description="layers of each pipeline stage; empty: model not known"
    )
    bytes_per_gpu: list[int] = Field(
        default_factory=list, max_length=512, description="planned bytes on a GPU of each stage"
    )
    reason: str = Field("", max_length=1024, description="given, or why auto chose it")

    def layout(self) -> Layout:
        """The sizes alone."""
        return Layout(**self.model_dump(exclude={"data", "stages", "bytes_per_gpu", "reason"}))


class GRPOJobStatus(Model):
    """Observed run."""

    observed_generation: int | None = Field(None, description="metadata.generation that this status is of")
    phase: str | None = Field(None, max_length=32, description="one word; the conditions say more")
    step: int | None = Field(None, description="finished steps")
    total_steps: int | None = Field(None, description="wanted steps")
    progress: str | None = Field(None, max_length=32, description="step/totalSteps")
    weight_version: int | None = Field(None, description="version that the engines were last brought to")
    reward_mean: str | None = Field(None, max_length=32, description="mean reward of the last step")
    tokens_per_second_per_gpu: str | None = Field(
        None, max_length=32, description="of the last step, over all trainer ranks"
    )
    last_checkpoint: CheckpointStatus | None = None
    train: PoolCount | None = None
    rollout: PoolCount | None = None
    restarts: RestartCounts | None = None
    attempt: int | None = Field(None, description="starts of the controller or of the training gang")
    layout: LayoutStatus | None = None
    started_at: str | None = Field(None, max_length=32, description="RFC 3339, UTC")
    finished_at: str | None = Field(None, max_length=32, description="RFC 3339, UTC")
    conditions: list[Condition] = Field(
        default_factory=list, max_length=16, description="Ready, Progressing, Degraded, ... with reasons"
    )
    train_ready: str | None = Field(None, max_length=16, description="train.ready/train.total")
    rollout_ready: str | None = Field(None, max_length=16, description="rollout.ready/rollout.total")
    weights: str | None = Field(None, max_length=16, description="weightVersion as v0, v1, ...")
    tokens: TokensStatus | None = None
    data: DataStatus | None = None
