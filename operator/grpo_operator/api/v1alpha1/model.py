"""The policy model and its weight synchronization, shared by GRPOJob and RolloutPool."""

from typing import Any, Literal

from pydantic import Field, field_validator

from grpo_operator.api.base import Model, Path, ShortString
from grpo_operator.api.catalog.architectures import ARCHITECTURES, architecture
from grpo_operator.api.catalog.presets import PRESET, PRESETS, preset
from grpo_operator.api.rules import Rule
from grpo_operator.api.v1alpha1.volumes import VolumeSpec, within

_PUBLISHED = sorted({*ARCHITECTURES} - {*PRESETS})

_MODEL_RULES: tuple[Rule["ModelSpec"], ...] = (
    Rule(
        "!has(self.volume) || self.path == self.volume.mountPath"
        " || self.path.startsWith(self.volume.mountPath + '/')",
        "model.path must lie in model.volume.mountPath: correct one of the two",
        lambda model: model.volume is None or within(model.path, model.volume.mount_path),
    ),
)


class ModelSpec(Model):
    """The policy model."""

    rules = _MODEL_RULES
    path: Path = Field(
        pattern=r"^(preset:[a-z0-9-]+|/.+)$",
        description="preset:NAME, or the absolute path of a Hugging Face model directory inside the pods",
    )
    volume: VolumeSpec | None = Field(
        None,
        description="volume that holds path; mounted into the controller, the training pods and the engines",
    )
    architecture: ShortString | None = Field(
        None,
        pattern=r"^[a-z0-9][a-z0-9.-]*$",
        description=f"architecture of the model in path ({', '.join(_PUBLISHED)}): with it the operator can "
        "plan memory before any pod exists",
    )
    multi_token_prediction: bool = Field(
        False,
        description="load, train, synchronize and export DeepSeek-V3's multi-token prediction (MTP) layer, "
        "which predicts the token after the next. It is trained on the responses; its loss does not change "
        "the policy. false: the layer is left out",
    )

    @field_validator("path")
    @classmethod
    def _known_preset(cls, path: str) -> str:
        if path.startswith(PRESET):
            preset(path)  # raises for an unknown name
        return path

    @field_validator("architecture")
    @classmethod
    def _known_architecture(cls, name: str | None) -> str | None:
        if name is not None:
            architecture(name)  # raises for an unknown name
        return name

    def config(self) -> dict[str, Any] | None:
        """Return the model's config.json, or None when only the pods can read it."""
        if self.path.startswith(PRESET):
            return preset(self.path)
        return architecture(self.architecture) if self.architecture else None


TIMEOUT_SECONDS = 120  # of timeoutSeconds: the smallest default

_WEIGHT_SYNC_RULES: tuple[Rule["WeightSyncSpec"], ...] = (
    Rule(
        "self.mode != 'delta' || self.transport in ['auto', 'staged']",
        "weightSync.mode delta needs weightSync.transport staged, because changes are detected in the "
        "agents' host memory: remove transport",
        lambda sync: sync.mode != "delta" or sync.transport in ("auto", "staged"),
    ),
)


class WeightSyncSpec(Model):
    """Transfer of new weight versions from the trainer to the engines."""

    rules = _WEIGHT_SYNC_RULES
    transport: Literal["auto", "nccl", "gloo", "staged", "nixl", "cuda-ipc"] = Field(
        "auto",
        description="path of a weight version to the engines. nccl (GPUs) and gloo (CPUs): direct transfer "
        "over a link for each engine, which is a process group of all trainer ranks and the engine's ranks. "
        "staged: through the host memory of the agents; also used for engines that join later and for those "
        "whose link failed. nixl: as staged, and agents read each other's memory with NIXL, over the RDMA "
        "adapters that podTemplate gives them, else over TCP. cuda-ipc: each engine reads the memory of the "
        "ranks on the same GPUs; both pods mount /run/grpo-operator of the node. auto: nccl if the trainer "
        "has GPUs, else gloo; staged with mode delta and for colocated engines",
    )
    mode: Literal["full", "delta"] = Field(
        "full",
        description="full: engines fetch all bytes of a new version. delta: only the bytes that changed "
        "since the previous version, which pays off if the network is slower than host memory",
    )
    bucket_megabytes: int = Field(
        512,
        ge=1,
        le=65536,
        description="size of a weight bucket in MiB; a GPU holds up to two buckets at once",
    )
    timeout_seconds: int | None = Field(
        None,
        ge=1,
        le=3600,
        description=(
            "seconds that an engine may hold up a version without progress: a wave of a direct transfer, a "
            "chunk of a staged version, an answer after the last one; a whole update has no limit. Default: "
            "eight times the estimated seconds of a wave, at least 120"
        ),
    )

    @property
    def patience(self) -> int:
        """Return ``timeoutSeconds``, or its smallest default where no plan has set it."""
        return self.timeout_seconds or TIMEOUT_SECONDS
