"""Training pool of a job: size, parallelism, optimizer, offloading."""

from enum import StrEnum
from typing import Literal

from pydantic import Field

from grpo_operator.api.base import Device, Model, Resources
from grpo_operator.api.catalog.gpus import GpuType
from grpo_operator.api.rules import Rule
from grpo_operator.api.v1alpha1.activation_rules import OFFLOAD_RULES, RECOMPUTE_RULES
from grpo_operator.api.v1alpha1.gradient_check import GRADIENT_CHECK_RULES, GradientCheckSpec
from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.api.v1alpha1.megatron import MegatronFields
from grpo_operator.api.v1alpha1.moe import MoeSpec
from grpo_operator.api.v1alpha1.moe_rules import MOE_RULES
from grpo_operator.api.v1alpha1.offload import OffloadSpec
from grpo_operator.api.v1alpha1.optimizer import OptimizerSpec
from grpo_operator.api.v1alpha1.optimizer_dtypes import OptimizerDtypes
from grpo_operator.api.v1alpha1.recompute import Recompute, RecomputeKind, RecomputeModule
from grpo_operator.api.v1alpha1.scheduling import WithOverlay


class KernelChoice(StrEnum):
    """Kernels of the layers."""

    AUTO = "auto"
    TRANSFORMER_ENGINE = "transformer-engine"
    LOCAL = "local"


class Precision(StrEnum):
    """Precision of the layers' matrix products."""

    BF16 = "bf16"
    FP8_BLOCK128 = "fp8-block128"


_PARALLELISM_RULES: tuple[Rule["ParallelismSpec"], ...] = (
    Rule(
        "!self.auto || (self.tensor == 1 && self.pipeline == 1 && self.context == 1"
        " && self.expert == 1 && self.expertTensor == 1 && self.virtualPipeline == 1"
        " && !has(self.layersInFirstStage) && !has(self.layersInLastStage))",
        "auto chooses every size: remove the sizes, or set auto to false",
        lambda sizes: not sizes.auto or sizes.model_dump(exclude_defaults=True).keys() == {"auto"},
    ),
    Rule(
        "self.pipeline > 1 || (!has(self.layersInFirstStage) && !has(self.layersInLastStage))",
        "layersInFirstStage and layersInLastStage need pipeline > 1: remove them, or raise pipeline",
        lambda sizes: (
            sizes.pipeline > 1 or (sizes.layers_in_first_stage is None and sizes.layers_in_last_stage is None)
        ),
    ),
    Rule(
        "self.virtualPipeline == 1 || self.pipeline > 1",
        "virtualPipeline needs pipeline > 1: set virtualPipeline to 1, or raise pipeline",
        lambda sizes: sizes.virtual_pipeline == 1 or sizes.pipeline > 1,
    ),
)


class ParallelismSpec(Model):
    """Sizes of Megatron-Core's parallel axes. Sequence parallelism is on if tensor > 1."""

    rules = _PARALLELISM_RULES
    auto: bool = Field(
        False, description="let the operator choose all sizes, by GPU memory and estimated step time"
    )
    tensor: int = Field(1, ge=1, le=64, description="tensor-parallel size (TP): GPUs that share every matrix")
    pipeline: int = Field(
        1, ge=1, le=128, description="pipeline-parallel size (PP): stages that share the layers"
    )
    context: int = Field(1, ge=1, le=64, description="context-parallel size (CP): GPUs that share a sequence")
    expert: int = Field(
        1, ge=1, le=512, description="expert-parallel size (EP): GPUs that share the experts of a layer"
    )
    expert_tensor: int = Field(
        1, ge=1, le=64, description="tensor-parallel size of experts (ETP): GPUs that share one expert"
    )
    virtual_pipeline: int = Field(
        1, ge=1, le=64, description="model chunks per stage (VPP), interleaved for smaller pipeline bubbles"
    )
    layers_in_first_stage: int | None = Field(
        None, ge=1, le=512, description="layers of the first stage; default: the same as the other stages"
    )
    layers_in_last_stage: int | None = Field(
        None, ge=1, le=512, description="layers of the last stage; default: the same as the other stages"
    )

    def layout(self, world: int) -> Layout:
        """Return the layout of ``world`` ranks.

        Raises ValueError if the product of the sizes does not divide ``world``.
        """
        return Layout(world=world, **self.model_dump(exclude={"auto"}))


_TRAINER_RULES: tuple[Rule["TrainerSpec"], ...] = (
    Rule(
        "(self.nodes * self.gpusPerNode) % (self.parallelism.tensor * self.parallelism.pipeline"
        " * self.parallelism.context) == 0",
        "nodes x gpusPerNode must be a multiple of tensor x pipeline x context: change parallelism or nodes",
        lambda trainer: (
            trainer.world
            % (trainer.parallelism.tensor * trainer.parallelism.pipeline * trainer.parallelism.context)
            == 0
        ),
    ),
    Rule(
        "(self.nodes * self.gpusPerNode) % (self.parallelism.expert"
        " * self.parallelism.expertTensor * self.parallelism.pipeline) == 0",
        "nodes x gpusPerNode must be a multiple of expert x expertTensor x pipeline: change parallelism or"
        " nodes",
        lambda trainer: (
            trainer.world
            % (trainer.parallelism.expert * trainer.parallelism.expert_tensor * trainer.parallelism.pipeline)
            == 0
        ),
    ),
    Rule(
        "!has(self.logProbMaxTokensPerGpu) || has(self.maxTokensPerGpu)",
        "logProbMaxTokensPerGpu needs maxTokensPerGpu: set both, or logProbMicroBatchSizePerGpu for padded "
        "sequences",
        lambda trainer: trainer.log_prob_max_tokens_per_gpu is None or trainer.max_tokens_per_gpu is not None,
    ),
    Rule(
        "!has(self.logProbMicroBatchSizePerGpu) || !has(self.maxTokensPerGpu)",
        "logProbMicroBatchSizePerGpu counts padded sequences, and maxTokensPerGpu packs them: set "
        "logProbMaxTokensPerGpu instead",
        lambda trainer: (
            trainer.log_prob_micro_batch_size_per_gpu is None or trainer.max_tokens_per_gpu is None
        ),
    ),
    Rule(
        "self.precision == 'bf16' || (self.device == 'cuda' && self.kernels != 'local')",
        "precision fp8-block128 needs device cuda and Transformer Engine's kernels: set kernels to auto or "
        "transformer-engine, or precision to bf16",
        lambda trainer: (
            trainer.precision is Precision.BF16
            or (trainer.device is Device.CUDA and trainer.kernels is not KernelChoice.LOCAL)
        ),
    ),
    Rule(
        "self.device == 'cuda' || (self.precisionAwareOptimizer.mainGradsDtype == 'fp32'"
        " && self.precisionAwareOptimizer.expAvgDtype == 'fp32'"
        " && self.precisionAwareOptimizer.expAvgSqDtype == 'fp32')",
        "precisionAwareOptimizer needs device cuda and Transformer Engine's Adam: set its fields to fp32, or "
        "device to cuda",
        lambda trainer: trainer.device is Device.CUDA or not trainer.precision_aware_optimizer.narrow,
    ),
)


class TrainerSpec(WithOverlay):
    """The training pool."""

    rules = (*_TRAINER_RULES, *MOE_RULES, *RECOMPUTE_RULES, *OFFLOAD_RULES, *GRADIENT_CHECK_RULES)
    nodes: int = Field(ge=1, le=4096, description="pods of the training pool")
    gpus_per_node: int = Field(8, ge=1, le=16, description="trainer ranks per pod; on cuda each has one GPU")
    spare_nodes: int = Field(
        0,
        ge=0,
        le=256,
        description="further pods like those of the training pool, which run no ranks: when a training pod "
        "is lost, its ranks start on a spare pod at once, and the pod that replaces it becomes the spare. "
        "Spare pods hold their GPUs",
    )
    device: Device = Field(Device.CUDA, description="device of the ranks: cuda or cpu")
    gpu_type: GpuType = Field(GpuType.H100, description="GPU model that the planner assumes (cuda only)")
    kernels: KernelChoice = Field(
        KernelChoice.AUTO,
        description="kernels of the layers. local: Megatron-Core's own and PyTorch's. transformer-engine: "
        "Transformer Engine's, with the experts of a layer in one product. auto: transformer-engine on GPUs "
        "where the image has it, otherwise local",
    )
    precision: Precision = Field(
        Precision.BF16,
        description="precision of the layers' matrix products. bf16: as the weights (on cpu both are fp32). "
        "fp8-block128: e4m3, with an fp32 scale for each 128 x 128 block of a weight and for each 128 values "
        "of an activation; weights and gradients stay as they are. It needs Transformer Engine",
    )
    deterministic: bool = Field(
        False,
        description="kernels and collectives that add in a fixed order: a step repeated from the same "
        "checkpoint with the same samples has the same bits, at some cost of speed on GPUs (Megatron-Core: "
        "deterministic_mode). For the same samples, set the engines' deterministic too. On cpu every step is "
        "deterministic",
    )
    gradient_check: GradientCheckSpec | None = Field(
        None, description="gradients that are computed twice, to find faulty GPUs; default: none are"
    )
    recompute: Literal["none", "selective", "full", "auto"] = Field(
        "full",
        description="activation recomputation. full: keep only each layer's input for the backward pass. "
        "selective: keep the other activations than those of recomputeModules. none: keep all activations. "
        "auto: the fastest of none, selective and full that fits, by GPU memory and estimated step time",
    )
    recompute_modules: list[RecomputeModule] | None = Field(
        None,
        min_length=1,
        max_length=len(RecomputeModule),
        description="modules that recompute: selective recomputes, under Megatron-Core's names. Default: "
        "layernorm, mla_up_proj, moe_act and mlp, without those that the model or its kernels do not have",
    )
    recompute_layers: int | None = Field(
        None,
        ge=1,
        le=512,
        description="number of layers of each pipeline stage that recompute: full recomputes, the first "
        "ones (of each of its chunks with virtualPipeline); default: all (Megatron-Core: "
        "recompute_num_layers with recompute_method block)",
    )
    offload: OffloadSpec = Field(default_factory=OffloadSpec)
    parallelism: ParallelismSpec = Field(default_factory=ParallelismSpec)
    optimizer: OptimizerSpec = Field(default_factory=OptimizerSpec)
    precision_aware_optimizer: OptimizerDtypes = Field(
        default_factory=OptimizerDtypes,
        description="number formats of the gradients and optimizer state of all trained models. Others than "
        "fp32 need Transformer Engine's Adam (Megatron-Core: use_precision_aware_optimizer)",
    )
    moe: MoeSpec = Field(default_factory=MoeSpec)
    megatron: MegatronFields = Field(default_factory=dict)
    mini_batch_size: int = Field(128, ge=1, le=65536, description="prompts per optimizer step")
    micro_batch_size_per_gpu: int = Field(
        1, ge=1, le=65536, description="sequences per forward pass on each GPU"
    )
    max_tokens_per_gpu: int | None = Field(
        None,
        ge=1,
        le=2**24,
        description="pack sequences without padding, up to this number of tokens of a forward pass on each "
        "GPU, instead of using microBatchSizePerGpu (verl: ppo_max_token_len_per_gpu). Context-parallel GPUs "
        "share a forward pass",
    )
    log_prob_micro_batch_size_per_gpu: int | None = Field(
        None,
        ge=1,
        le=65536,
        description="microBatchSizePerGpu of passes without gradients: log-probabilities, values of the "
        "critic, scores of a reward model (verl: log_prob_micro_batch_size_per_gpu). They keep no "
        "activations. Default: microBatchSizePerGpu",
    )
    log_prob_max_tokens_per_gpu: int | None = Field(
        None,
        ge=1,
        le=2**24,
        description="maxTokensPerGpu of passes without gradients (verl: log_prob_max_token_len_per_gpu). "
        "Default: maxTokensPerGpu",
    )
    resources: Resources = Field(default_factory=Resources)
    agent_resources: Resources = Field(
        default_factory=Resources,
        description="resources of the agent in each training pod, which holds snapshots of other pods' ranks "
        "(checkpoint.memory)",
    )
    node_selector: dict[str, str] = Field(
        default_factory=dict, max_length=16, description="labels of the nodes that the pods may run on"
    )

    @property
    def world(self) -> int:
        """Return the number of ranks."""
        return self.nodes * self.gpus_per_node

    @property
    def pods(self) -> int:
        """Return the number of training pods, with the spare ones."""
        return self.nodes + self.spare_nodes

    @property
    def groups_experts(self) -> bool:
        """Return whether the kernels compute the experts of a layer in one product, as far as is known.

        ``kernels: auto`` counts as Transformer Engine's on GPUs.
        """
        return self.device is Device.CUDA and self.kernels is not KernelChoice.LOCAL

    def recomputation(self) -> Recompute:
        """Return what the ranks recompute, from a spec with the planned modules.

        Raises ValueError while the spec leaves it to the planner.
        """
        if self.recompute == "auto":
            raise ValueError("recompute=auto: the planner has not chosen yet what to recompute")
        return Recompute(
            RecomputeKind(self.recompute), tuple(self.recompute_modules or ()), self.recompute_layers
        )
