"""What both kinds say of the policy and of its way to the engines."""

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from grpo_operator.api.base import Device, Model, Path, ShortString
from grpo_operator.api.catalog.architectures import PRESETS, architecture
from grpo_operator.api.v1alpha1.volumes import VolumeSpec, within

_OUTSIDE = "model.path must lie in model.volume.mountPath: correct one of the two"


class ModelSpec(Model):
    """The policy."""

    cel = (
        (
            "!has(self.volume) || self.path == self.volume.mountPath"
            " || self.path.startsWith(self.volume.mountPath + '/')",
            _OUTSIDE,
        ),
    )
    path: Path = Field(
        pattern=r"^(preset:[a-z0-9-]+|/.+)$",
        description="preset:NAME, or the absolute path of a Hugging Face directory in the pods",
    )
    volume: VolumeSpec | None = Field(
        None, description="what holds path; mounted into controller, training pods and engines"
    )
    architecture: ShortString | None = Field(
        None,
        pattern=r"^[a-z0-9][a-z0-9.-]*$",
        description="name of the directory's architecture (deepseek-v3, qwen3-30b-a3b, qwen3-8b): "
        "lets the operator plan memory before any pod exists",
    )

    multi_token_prediction: bool = Field(
        False,
        description="DeepSeek-V3's layer that guesses the token after the next: load it, train it on the "
        "answers (it alone, the policy learns nothing from it), send and export it; else it is left out",
    )

    @field_validator("path")
    @classmethod
    def _known_preset(cls, path: str) -> str:
        if path.startswith("preset:") and path.removeprefix("preset:") not in PRESETS:
            raise ValueError(f"unknown preset: use preset:{', preset:'.join(PRESETS)}, or an absolute path")
        return path

    @field_validator("architecture")
    @classmethod
    def _known_architecture(cls, name: str | None) -> str | None:
        if name is not None:
            architecture(name)  # raises for an unknown name
        return name

    @model_validator(mode="after")
    def _path_is_mounted(self) -> "ModelSpec":
        if self.volume is not None and not within(self.path, self.volume.mount_path):
            raise ValueError(f"{_OUTSIDE} (path {self.path}, mountPath {self.volume.mount_path})")
        return self

    def config(self) -> dict[str, Any] | None:
        """config.json of the model, or None when only the pods can read it."""
        if self.path.startswith("preset:"):
            return architecture(self.path.removeprefix("preset:"))
        return architecture(self.architecture) if self.architecture else None


class WeightSyncSpec(Model):
    """How weights reach the engines."""

    cel = (
        (
            "self.mode != 'delta' || self.transport in ['auto', 'staged']",
            "mode delta needs transport staged: what changed is found in the agents' memory",
        ),
    )

    transport: Literal["auto", "nccl", "gloo", "staged", "nixl", "cuda-ipc"] = Field(
        "auto",
        description="how a version travels: over one process group of all trainer ranks and engines (nccl "
        "between GPUs, gloo between CPUs), or staged in the agents' host memory, which is also the way for "
        "engines that come late and after a failure of the group. nixl: staged, and agents read each other's "
        "memory by NIXL: over RDMA adapters that podTemplate gives the agents, else TCP. cuda-ipc: engines "
        "read the memory of the ranks whose GPUs they share, for which both pods get hostIPC and hostPID. "
        "auto: nccl where trainers have GPUs, else gloo; staged with mode delta and for colocated engines",
    )
    mode: Literal["full", "delta"] = Field(
        "full",
        description="what engines fetch of a new version: all bytes, or those that changed since the last, "
        "which pays where the network is slower than memory",
    )
    bucket_megabytes: int = Field(
        512, ge=1, le=65536, description="MiB that a bucket of weights takes; a GPU holds two at once"
    )
    timeout_seconds: int = Field(120, ge=1, le=3600, description="deadline of one sync of one engine")

    @model_validator(mode="after")
    def _delta_is_staged(self) -> "WeightSyncSpec":
        if self.mode == "delta" and self.transport not in ("auto", "staged"):
            raise ValueError(
                f"weightSync.mode delta needs transport staged, not {self.transport}: what changed is found "
                "in the agents' memory; leave transport out"
            )
        return self

    def link_backend(
        self, device: Device, shares_gpus: bool = False
    ) -> Literal["nccl", "gloo", "cuda-ipc"] | None:
        """Of the link between trainers on ``device`` and engines; None: everything is staged."""
        if self.transport == "nccl" or self.transport == "gloo" or self.transport == "cuda-ipc":
            return self.transport
        if self.transport != "auto" or self.mode == "delta" or shares_gpus:
            return None
        return "nccl" if device is Device.CUDA else "gloo"
