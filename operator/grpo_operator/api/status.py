"""Status vocabulary shared by both kinds."""

from enum import StrEnum

from pydantic import Field

from grpo_operator.api.base import Model
from grpo_operator.api.layout import Layout


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

    type: str = Field(max_length=64)
    status: str = Field(pattern=r"^(True|False|Unknown)$", max_length=8)
    reason: str = Field(max_length=64)
    message: str = Field("", max_length=4096)
    last_transition_time: str = Field(max_length=32)
    observed_generation: int | None = None


class EngineStatus(Model):
    """One engine as its sidecar reports it."""

    name: str = Field(max_length=253)
    state: EngineState
    weight_version: int | None = None
    endpoint: str | None = Field(None, max_length=253)
    last_transition: str | None = Field(None, max_length=32)
    restarts: int | None = None


class CheckpointStatus(Model):
    """The newest complete checkpoint."""

    step: int
    location: str = Field(max_length=1024)
    complete: bool


class RestartCounts(Model):
    """Restarts by cause. ``job`` counts towards maxRestarts, ``infrastructure`` does not."""

    job: int = 0
    infrastructure: int = 0


class PoolCount(Model):
    """Of the training pool, ranks (GPUs) in ready pods; of the rollout pool, ready engines."""

    ready: int = 0
    total: int = 0


class LayoutStatus(Model):
    """The layout that the operator computed from the spec."""

    world: int
    data: int
    tensor: int
    pipeline: int
    context: int
    expert: int
    expert_tensor: int
    layers_in_first_stage: int | None = None
    layers_in_last_stage: int | None = None
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
