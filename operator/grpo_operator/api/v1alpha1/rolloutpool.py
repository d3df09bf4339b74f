"""RolloutPool: a set of SGLang engines that serve one model at one weight version."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from grpo_operator.api.base import Device, Model, Resources, ShortString
from grpo_operator.api.catalog.gpus import GpuType
from grpo_operator.api.v1alpha1.model import ModelSpec, WeightSyncSpec
from grpo_operator.api.v1alpha1.scheduling import SchedulingSpec, WithOverlay
from grpo_operator.api.v1alpha1.status import Condition, EngineStatus


class EngineSpec(Model):
    """One SGLang server."""

    device: Device = Field(Device.CUDA, description="cuda or cpu")
    cel = (
        (
            "self.tensorParallel % self.expertParallel == 0",
            "expertParallel must divide tensorParallel",
        ),
        (
            "self.tensorParallel % self.attentionDataParallel == 0",
            "attentionDataParallel must divide tensorParallel",
        ),
        (
            "self.device == 'cpu' || self.tensorParallel == self.nodesPerEngine * self.gpusPerNode",
            "tensorParallel must equal nodesPerEngine x gpusPerNode: it counts all GPUs of the engine",
        ),
    )
    tensor_parallel: int = Field(1, ge=1, le=256, description="all GPUs of the engine (SGLang: tp-size)")
    expert_parallel: int = Field(
        1, ge=1, le=256, description="GPUs over which experts are dealt out (SGLang: ep-size)"
    )
    attention_data_parallel: int = Field(
        1, ge=1, le=256, description="replicas of the attention part (SGLang: dp-size with dp-attention)"
    )
    nodes_per_engine: int = Field(1, ge=1, le=64, description="pods of one engine; they live and die as one")
    gpus_per_node: int = Field(1, ge=1, le=16, description="GPUs of one engine pod (cuda only)")
    gpu_type: GpuType = Field(GpuType.H100, description="what the planner counts with (cuda only)")
    quantization: Literal["none", "fp8-block128"] = Field(
        "none", description="form of the weights in the engine"
    )
    dtype: str = Field(
        "bfloat16", pattern=r"^(bfloat16|float16|float32)$", max_length=16, description="of computing"
    )
    context_length: int = Field(4096, ge=16, le=1048576, description="tokens of prompt and response")
    max_total_tokens: int | None = Field(
        None, ge=64, le=100_000_000, description="tokens of KV cache; default: by free memory"
    )
    max_running_requests: int = Field(128, ge=1, le=65536, description="sequences at once")
    memory_fraction: float = Field(
        0.85, gt=0, lt=1, description="share of GPU memory for weights and KV cache (cuda only)"
    )
    tokenizer: bool = Field(
        False, description="load the model's tokenizer, which algorithm.stop needs and token ids do not"
    )
    return_routed_experts: bool = Field(
        False, description="say which experts each token took: for algorithm.routingReplay"
    )
    extra_args: list[Annotated[str, Field(max_length=256)]] = Field(
        default_factory=list, max_length=64, description="further arguments of sglang.launch_server"
    )

    @model_validator(mode="after")
    def _check(self) -> "EngineSpec":
        for field, size in (
            ("expertParallel", self.expert_parallel),
            ("attentionDataParallel", self.attention_data_parallel),
        ):
            if self.tensor_parallel % size:
                raise ValueError(f"{field} ({size}) must divide tensorParallel ({self.tensor_parallel})")
        gpus = self.nodes_per_engine * self.gpus_per_node
        if self.device == Device.CUDA and self.tensor_parallel != gpus:
            raise ValueError(
                f"tensorParallel ({self.tensor_parallel}) must equal nodesPerEngine x gpusPerNode = {gpus}"
            )
        return self


class RolloutTemplate(WithOverlay):
    """Desired engines."""

    cel = (
        (
            "self.minAvailable <= self.replicas",
            "minAvailable must not exceed replicas: lower minAvailable or raise replicas",
        ),
    )
    replicas: int = Field(1, ge=1, le=512, description="number of engines")
    min_available: int = Field(
        1, ge=1, le=512, description="engines that a weight sync must reach to be committed"
    )
    engine: EngineSpec = Field(default_factory=EngineSpec)
    resources: Resources = Field(default_factory=lambda: Resources(cpu="1", memory="4Gi"))
    node_selector: dict[str, str] = Field(
        default_factory=dict, max_length=16, description="labels of the nodes to use"
    )
    image: ShortString | None = Field(None, description="container image; default: the operator's")

    @model_validator(mode="after")
    def _check(self) -> "RolloutTemplate":
        if self.min_available > self.replicas:
            raise ValueError(
                f"minAvailable ({self.min_available}) exceeds replicas ({self.replicas}): "
                "lower minAvailable or raise replicas"
            )
        return self


class RolloutPoolSpec(RolloutTemplate):
    """Desired engines and their model. In the pool of a job the job's own settings hold."""

    model: ModelSpec
    weight_sync: WeightSyncSpec = Field(default_factory=WeightSyncSpec)
    scheduling: SchedulingSpec = Field(default_factory=SchedulingSpec)
    upgrade_strategy: Literal["None", "Recreate"] = Field(
        "None", description="after a change of image: new pods alone get it, or all are replaced at once"
    )


class RolloutPoolStatus(Model):
    """Observed engines."""

    observed_generation: int | None = Field(None, description="metadata.generation that this status is of")
    phase: str | None = Field(None, max_length=32, description="Pending, Starting, Degraded or Serving")
    replicas: int | None = Field(None, description="engines that have a pod")
    ready_replicas: int | None = Field(None, description="engines that serve")
    weight_version: int | None = Field(None, description="newest version that an engine serves")
    bound_to: str | None = Field(None, max_length=253, description="the GRPOJob that writes the weights")
    selector: str | None = Field(None, max_length=512, description="label selector of the engines' pods")
    engines: list[EngineStatus] = Field(
        default_factory=list, max_length=512, description="each engine as its sidecar reports it"
    )
    conditions: list[Condition] = Field(
        default_factory=list, max_length=16, description="Ready, Degraded, Reconciling, Stalled"
    )
