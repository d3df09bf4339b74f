"""The static training pool of a job: size, layout, optimizer."""

from typing import Literal

from pydantic import Field, model_validator

from grpo_operator.api.base import Device, Model, Resources
from grpo_operator.api.catalog.gpus import GpuType
from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.api.v1alpha1.scheduling import WithOverlay


class OptimizerSpec(Model):
    """Adam with Megatron-Core's distributed optimizer."""

    lr: float = Field(1e-6, ge=0, le=1, description="learning rate")
    min_lr: float = Field(0.0, ge=0, le=1, description="learning rate at the end of a decay")
    lr_warmup_steps: int = Field(0, ge=0, le=10**7, description="optimizer steps of linear warm-up")
    lr_decay_style: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="learning rate after the warm-up, over totalSteps"
    )
    weight_decay: float = Field(0.01, ge=0, le=1, description="decoupled, as in AdamW")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="decay of the first moment")
    adam_beta2: float = Field(0.95, ge=0, lt=1, description="decay of the second moment")
    clip_grad: float = Field(1.0, gt=0, le=1000, description="largest global norm of the gradients")


class ParallelismSpec(Model):
    """Sizes of Megatron-Core's parallel axes. Sequence parallelism is on whenever tensor > 1."""

    cel = (
        (
            "!self.auto || (self.tensor == 1 && self.pipeline == 1 && self.context == 1"
            " && self.expert == 1 && self.expertTensor == 1 && self.virtualPipeline == 1"
            " && !has(self.layersInFirstStage) && !has(self.layersInLastStage))",
            "auto chooses every size: remove the sizes, or set auto to false",
        ),
        (
            "self.pipeline > 1 || (!has(self.layersInFirstStage) && !has(self.layersInLastStage))",
            "layersInFirstStage and layersInLastStage need pipeline > 1",
        ),
        ("self.virtualPipeline == 1 || self.pipeline > 1", "virtualPipeline needs pipeline > 1"),
    )
    auto: bool = Field(False, description="let the operator choose, by memory and estimated step time")
    tensor: int = Field(1, ge=1, le=64, description="GPUs that share every matrix (TP)")
    pipeline: int = Field(1, ge=1, le=128, description="stages of layers (PP)")
    context: int = Field(1, ge=1, le=64, description="GPUs that share a sequence (CP)")
    expert: int = Field(1, ge=1, le=512, description="GPUs over which experts are dealt out (EP)")
    expert_tensor: int = Field(1, ge=1, le=64, description="GPUs that share one expert (ETP)")
    virtual_pipeline: int = Field(
        1, ge=1, le=64, description="model chunks of each stage, run in turn (VPP): smaller bubbles"
    )
    layers_in_first_stage: int | None = Field(None, ge=1, le=512, description="default: as the others")
    layers_in_last_stage: int | None = Field(None, ge=1, le=512, description="default: as the others")

    def layout(self, world: int) -> Layout:
        """The layout of ``world`` ranks.

        Raises ValueError when the sizes do not multiply up to it.
        """
        return Layout(world=world, **self.model_dump(exclude={"auto"}))


class OffloadSpec(Model):
    """What waits in the host's memory (trainer.resources.memory must hold it) while it is not needed."""

    parameters: bool = Field(
        False, description="weights of each role (policy, reference, critic) while another one computes"
    )
    gradients: bool = Field(False, description="gradient buffers, outside of an update; they keep nothing")
    optimizer: bool = Field(False, description="Adam's state and main weights, but for the optimizer's step")


class TrainerSpec(WithOverlay):
    """The static training pool."""

    cel = (
        (
            "(self.nodes * self.gpusPerNode) % (self.parallelism.tensor * self.parallelism.pipeline"
            " * self.parallelism.context) == 0",
            "nodes x gpusPerNode must be a multiple of tensor x pipeline x context:"
            " change parallelism or nodes",
        ),
        (
            "(self.nodes * self.gpusPerNode) % (self.parallelism.expert"
            " * self.parallelism.expertTensor * self.parallelism.pipeline) == 0",
            "nodes x gpusPerNode must be a multiple of expert x expertTensor x pipeline:"
            " change parallelism or nodes",
        ),
        (
            "!has(self.maxTokensPerGpu) || self.parallelism.context == 1",
            "maxTokensPerGpu packs sequences, which context parallelism cannot cut:"
            " remove it or set parallelism.context to 1",
        ),
    )
    nodes: int = Field(ge=1, le=4096, description="pods of the training pool")
    gpus_per_node: int = Field(8, ge=1, le=16, description="ranks of a pod, one GPU each on cuda")
    device: Device = Field(Device.CUDA, description="cuda or cpu")
    gpu_type: GpuType = Field(GpuType.H100, description="what the planner counts with (cuda only)")
    recompute: Literal["none", "full"] = Field(
        "full", description="full: keep only each layer's input for the backward pass"
    )
    offload: OffloadSpec = Field(default_factory=OffloadSpec)
    parallelism: ParallelismSpec = Field(default_factory=ParallelismSpec)
    optimizer: OptimizerSpec = Field(default_factory=OptimizerSpec)
    mini_batch_size: int = Field(128, ge=1, le=65536, description="prompts of one optimizer step")
    micro_batch_size_per_gpu: int = Field(1, ge=1, le=65536, description="sequences of one forward")
    max_tokens_per_gpu: int | None = Field(
        None,
        ge=1,
        le=2**24,
        description="pack sequences without padding up to this many tokens a forward, instead of "
        "microBatchSizePerGpu (verl: ppo_max_token_len_per_gpu)",
    )
    resources: Resources = Field(default_factory=lambda: Resources(cpu="1", memory="4Gi"))
    node_selector: dict[str, str] = Field(
        default_factory=dict, max_length=16, description="labels of the nodes to use"
    )

    @model_validator(mode="after")
    def _check(self) -> "TrainerSpec":
        layout = self.parallelism.layout(self.world)  # raises when the sizes do not multiply up
        if self.max_tokens_per_gpu and layout.context > 1:
            raise ValueError(
                f"maxTokensPerGpu ({self.max_tokens_per_gpu}) packs sequences, which parallelism.context="
                f"{layout.context} cannot cut: remove it or set context to 1"
            )
        return self

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.nodes * self.gpus_per_node
