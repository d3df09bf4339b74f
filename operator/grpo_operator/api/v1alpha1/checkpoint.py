"""Checkpoints of a job: in the store, in host memory, and exports in Hugging Face format."""

from typing import Literal

from pydantic import Field

from grpo_operator.api.base import Model, Name, Path
from grpo_operator.api.rules import Rule

_STORE_RULES: tuple[Rule["StoreSpec"], ...] = (
    Rule(
        "has(self.path) != has(self.pvc)",
        "set exactly one of path and pvc",
        lambda store: (store.path is None) != (store.pvc is None),
    ),
)


class StoreSpec(Model):
    """Storage for checkpoints and logs. Exactly one of path and pvc."""

    rules = _STORE_RULES
    path: Path | None = Field(None, pattern=r"^/.+$", description="absolute directory on every node")
    pvc: Name | None = Field(None, description="name of a ReadWriteMany PersistentVolumeClaim")

    @property
    def label(self) -> str:
        """Name of the store in messages: the field that names it, and its value."""
        return f"checkpoint.store.pvc={self.pvc}" if self.pvc else f"checkpoint.store.path={self.path}"


class MemoryTierSpec(Model):
    """Copies of the training state in the host memory of the training pods.

    A restart from them loses fewer steps than one from the store. trainer.resources.memory must be large
    enough for them.
    """

    every_steps: int = Field(1, ge=1, le=10**6, description="number of steps between copies")
    replicas: int = Field(
        1,
        ge=0,
        le=3,
        description="number of other pods that hold each rank's copy; this many pods may be lost at once",
    )


_RESUME_RULES: tuple[Rule["ResumeFromSpec"], ...] = (
    Rule(
        "has(self.job) != has(self.path)",
        "set exactly one of job and path",
        lambda source: (source.job is None) != (source.path is None),
    ),
)


class ResumeFromSpec(Model):
    """Checkpoint of another job that this job starts from. Exactly one of job and path."""

    rules = _RESUME_RULES
    job: Name | None = Field(None, description="name of a GRPOJob in this namespace, with the same store")
    path: Path | None = Field(
        None,
        pattern=r"^/store(/[^/.][^/]*)+$",
        description="directory below /store, where pods mount the store: a checkpoint or the folder of a job",
    )
    step: int | None = Field(
        None, ge=1, le=10**7, description="step of the checkpoint; default: the newest complete one"
    )
    load: Literal["all", "weights"] = Field(
        "all",
        description="all: go on after the checkpoint's step, with its weights, optimizer and position in the "
        "data. weights: begin at step 0 with its weights alone",
    )

    @property
    def label(self) -> str:
        """Name of the source in messages: the field that names it, and its value."""
        return "checkpoint.resumeFrom." + (f"job={self.job}" if self.job else f"path={self.path}")


class CheckpointSpec(Model):
    """Distributed checkpoints and model exports."""

    store: StoreSpec
    resume_from: ResumeFromSpec | None = Field(
        None, description="checkpoint of another job that this job starts from; default: the model's weights"
    )
    every_steps: int = Field(10, ge=1, le=10**6, description="number of steps between checkpoints")
    keep: int = Field(2, ge=1, le=1000, description="number of complete checkpoints to keep")
    memory: MemoryTierSpec | None = None
    export_every_steps: int | None = Field(
        None,
        ge=1,
        le=10**6,
        description="number of steps between exports in Hugging Face format; default: no exports",
    )
    export_quantization: Literal["none", "fp8-block128"] = Field(
        "none",
        description="number format of exported weights. none: as trained. fp8-block128: FP8 with scales per "
        "128 x 128 block, as DeepSeek-V3 is published",
    )
    export_at_end: bool = Field(False, description="export in Hugging Face format after the last step")
