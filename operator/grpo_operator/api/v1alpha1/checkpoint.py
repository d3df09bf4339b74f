"""Checkpoints of a job: in the store, in host memory, and exports in Hugging Face format."""

from typing import Literal

from pydantic import Field

from grpo_operator.api.base import Model, Name, Path
from grpo_operator.api.rules import Rule

# Of an export's file, which has more only if it holds a single larger tensor.
EXPORT_FILE_BYTES = 2 * 2**30
ExportQuantization = Literal["none", "fp8-block128"]
_URI = r"^(s3|gs)://[a-z0-9][a-z0-9._-]+(/[A-Za-z0-9._=-]+)*$"
_STORE_RULES: tuple[Rule["StoreSpec"], ...] = (
    Rule(
        "[has(self.path), has(self.pvc), has(self.uri)].filter(given, given).size() == 1",
        "set exactly one of path, pvc and uri",
        lambda store: [store.path, store.pvc, store.uri].count(None) == 2,
    ),
    Rule(
        "has(self.uri) || !(has(self.endpoint) || has(self.secret))",
        "endpoint and secret belong to a uri: remove them, or set uri",
        lambda store: bool(store.uri or not (store.endpoint or store.secret)),
    ),
    Rule(
        "(has(self.uri) && self.uri.startsWith('s3://')) || !has(self.region)",
        "region belongs to a uri that begins with s3://: remove it, or set such a uri",
        lambda store: bool((store.uri and store.uri.startswith("s3://")) or not store.region),
    ),
)


class StoreSpec(Model):
    """Storage for checkpoints and logs. Exactly one of path, pvc and uri."""

    rules = _STORE_RULES
    path: Path | None = Field(None, pattern=r"^/.+$", description="absolute directory on every node")
    pvc: Name | None = Field(None, description="name of a ReadWriteMany PersistentVolumeClaim")
    uri: str | None = Field(
        None,
        max_length=512,
        pattern=_URI,
        description="bucket of an object store, and prefix in it: s3://BUCKET/PREFIX, or gs://BUCKET/PREFIX "
        "of Google Cloud Storage",
    )
    endpoint: str | None = Field(
        None,
        max_length=253,
        pattern=r"^https?://[A-Za-z0-9.\[\]:_-]+$",
        description="address of the server; default: that of AWS or Google",
    )
    region: str | None = Field(
        None,
        max_length=63,
        pattern=r"^[a-z0-9-]+$",
        description="region of an S3 bucket; default: as the environment of the pods says",
    )
    secret: Name | None = Field(
        None,
        description="name of a Secret. For S3 it has AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and may "
        "have AWS_SESSION_TOKEN; for Google it has key.json, the key of a service account. Default: the pods "
        "have the credentials of their service account or node",
    )

    @property
    def label(self) -> str:
        """Name of the store in messages: the field that names it, and its value."""
        kind = "pvc" if self.pvc else "uri" if self.uri else "path"
        return f"checkpoint.store.{kind}={self.pvc or self.uri or self.path}"


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
        "[has(self.job), has(self.path), has(self.uri)].filter(given, given).size() == 1",
        "set exactly one of job, path and uri",
        lambda source: [source.job, source.path, source.uri].count(None) == 2,
    ),
)


class ResumeFromSpec(Model):
    """Checkpoint of another job that this job starts from. Exactly one of job, path and uri."""

    rules = _RESUME_RULES
    job: Name | None = Field(None, description="name of a GRPOJob in this namespace, with the same store")
    path: Path | None = Field(
        None,
        pattern=r"^/store(/[^/.][^/]*)+$",
        description="directory below /store, where pods mount the store: a checkpoint or the folder of a job",
    )
    uri: str | None = Field(
        None,
        max_length=1024,
        pattern=_URI,
        description="checkpoint or folder of a job in a bucket, for a job whose checkpoint.store.uri is on "
        "the same server: s3://BUCKET/PREFIX or gs://BUCKET/PREFIX",
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
        kind = "job" if self.job else "uri" if self.uri else "path"
        return f"checkpoint.resumeFrom.{kind}={self.job or self.uri or self.path}"


class CheckpointSpec(Model):
    """Distributed checkpoints and model exports."""

    store: StoreSpec
    resume_from: ResumeFromSpec | None = Field(
        None, description="checkpoint of another job that this job starts from; default: the model's weights"
    )
    every_steps: int = Field(10, ge=1, le=10**6, description="number of steps between checkpoints")
    keep: int = Field(2, ge=1, le=1000, description="number of complete checkpoints to keep")
    deletion_policy: Literal["Retain", "Delete"] = Field(
        "Retain",
        description="effect of the deletion of the GRPOJob on the job's folder in the store. Retain: it "
        "stays. Delete: it is removed, with checkpoints, exports, ledger and metrics",
    )
    memory: MemoryTierSpec | None = None
    export_every_steps: int | None = Field(
        None,
        ge=1,
        le=10**6,
        description="number of steps between exports in Hugging Face format; default: no exports",
    )
    export_quantization: ExportQuantization = Field(
        "none",
        description="number format of exported weights. none: as trained. fp8-block128: FP8 with scales per "
        "128 x 128 block, as DeepSeek-V3 is published",
    )
    export_at_end: bool = Field(False, description="export in Hugging Face format after the last step")
