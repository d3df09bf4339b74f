"""RolloutPool: a set of SGLang engines that serve one model at one weight version.

Also the engines that a GRPOJob asks for: from a template of its own, or from an existing RolloutPool.
"""

import re
from typing import Annotated, Literal

from pydantic import Field

from grpo_operator.api.base import Device, Model, Name, Resources, ShortString
from grpo_operator.api.catalog.gpus import GpuType
from grpo_operator.api.rules import Rule
from grpo_operator.api.v1alpha1.model import ModelSpec, WeightSyncSpec
from grpo_operator.api.v1alpha1.scheduling import SchedulingSpec, WithOverlay
from grpo_operator.api.v1alpha1.serve import SERVE_RULES, SERVE_UPDATE_RULES, ServeSpec, ServeStatus
from grpo_operator.api.v1alpha1.status import Condition, EngineStatus, SettledImages

# Arguments of sglang.launch_server that fields of EngineSpec set.
TYPED_ARGUMENTS = (
    *("tp", "tp-size", "tensor-parallel-size", "ep", "ep-size", "expert-parallel-size"),
    *("dp", "dp-size", "data-parallel-size", "enable-dp-attention", "moe-dense-tp-size", "enable-dp-lm-head"),
    *("moe-a2a-backend", "enable-deterministic-inference", "speculative-algorithm", "speculative-algo"),
    *("speculative-num-steps", "speculative-eagle-topk", "speculative-num-draft-tokens"),
    # A threshold below 1 accepts tokens more often than the policy samples them.
    *("speculative-accept-threshold-single", "speculative-accept-threshold-acc"),
    *("nnodes", "node-rank", "dist-init-addr", "device", "dtype", "quantization", "context-length"),
    *("max-running-requests", "max-total-tokens", "mem-fraction-static", "skip-tokenizer-init"),
    *("enable-return-routed-experts", "model-path", "host", "port", "admin-api-key", "random-seed"),
)
_TYPED = f"^--({'|'.join(TYPED_ARGUMENTS)})(=.*)?$"

_ENGINE_RULES: tuple[Rule["EngineSpec"], ...] = (
    Rule(
        "self.tensorParallel % self.expertParallel == 0",
        "expertParallel must divide tensorParallel",
        lambda engine: engine.tensor_parallel % engine.expert_parallel == 0,
    ),
    Rule(
        "self.tensorParallel % self.attentionDataParallel == 0",
        "attentionDataParallel must divide tensorParallel",
        lambda engine: engine.tensor_parallel % engine.attention_data_parallel == 0,
    ),
    Rule(
        "self.device == 'cpu' || self.tensorParallel == self.nodesPerEngine * self.gpusPerNode",
        "tensorParallel must equal nodesPerEngine x gpusPerNode: it counts all GPUs of the engine",
        lambda engine: (
            engine.device is Device.CPU
            or engine.tensor_parallel == engine.nodes_per_engine * engine.gpus_per_node
        ),
    ),
    Rule(
        "self.moeA2aBackend == 'none'"
        " || (self.device == 'cuda' && self.expertParallel == self.tensorParallel)",
        "moeA2aBackend deepep needs device cuda and expertParallel equal to tensorParallel: SGLang "
        "distributes the experts over all GPUs of the engine then",
        lambda engine: (
            engine.moe_a2a_backend == "none"
            or (engine.device is Device.CUDA and engine.expert_parallel == engine.tensor_parallel)
        ),
    ),
    Rule(
        "!self.dpLmHead || self.attentionDataParallel > 1",
        "dpLmHead needs attentionDataParallel above 1: remove dpLmHead",
        lambda engine: not engine.dp_lm_head or engine.attention_data_parallel > 1,
    ),
    Rule(
        "self.speculative == 'none' || self.device == 'cuda'",
        "speculative mtp needs device cuda: on CPUs SGLang accepts the likeliest token instead of sampling:"
        " remove speculative",
        lambda engine: engine.speculative == "none" or engine.device is Device.CUDA,
    ),
    Rule(
        "self.speculative == 'none' || !has(self.deterministic) || !self.deterministic",
        "speculative mtp and deterministic exclude each other: which tokens are drafted together depends on"
        " where a sample was continued: remove one of the two",
        lambda engine: engine.speculative == "none" or not engine.deterministic,
    ),
    Rule(
        "self.speculative == 'none' || !self.returnRoutedExperts",
        "speculative mtp and returnRoutedExperts exclude each other: SGLang's record of routed experts has no"
        " room for drafted tokens: remove one of the two",
        lambda engine: engine.speculative == "none" or not engine.return_routed_experts,
    ),
    Rule(
        f"!has(self.extraArgs) || !self.extraArgs.exists(argument, argument.matches('{_TYPED}'))",
        "extraArgs must not repeat what a field sets: remove the argument, and set the field of the engine",
        lambda engine: not any(re.match(_TYPED, argument) for argument in engine.extra_args),
    ),
)


class EngineSpec(Model):
    """One SGLang server."""

    rules = _ENGINE_RULES
    device: Device = Field(Device.CUDA, description="device of the engine: cuda or cpu")
    tensor_parallel: int = Field(
        1, ge=1, le=256, description="number of GPUs of the engine (SGLang: tp-size)"
    )
    expert_parallel: int = Field(
        1, ge=1, le=256, description="number of GPUs that share the experts of a layer (SGLang: ep-size)"
    )
    attention_data_parallel: int = Field(
        1, ge=1, le=256, description="replicas of the attention layers (SGLang: dp-size with dp-attention)"
    )
    nodes_per_engine: int = Field(
        1, ge=1, le=64, description="pods of one engine; they are restarted together"
    )
    gpus_per_node: int = Field(1, ge=1, le=16, description="GPUs per engine pod (cuda only)")
    gpu_type: GpuType = Field(GpuType.H100, description="GPU model that the planner assumes (cuda only)")
    quantization: Literal["none", "fp8-block128"] = Field(
        "none", description="number format of the engine's weights; none: as dtype"
    )
    dtype: str = Field(
        "bfloat16",
        pattern=r"^(bfloat16|float16|float32)$",
        max_length=16,
        description="number format of activations",
    )
    context_length: int = Field(
        4096, ge=16, le=1048576, description="largest number of tokens of prompt and response together"
    )
    max_total_tokens: int | None = Field(
        None,
        ge=64,
        le=100_000_000,
        description="size of the KV cache in tokens; default: fills the free memory",
    )
    max_running_requests: int = Field(
        128, ge=1, le=65536, description="largest number of sequences generated at once"
    )
    memory_fraction: float = Field(
        0.85, gt=0, lt=1, description="fraction of GPU memory for weights and KV cache (cuda only)"
    )
    double_buffer: bool = Field(
        False,
        description="receive a weight version into a second copy of the weights while the engine generates,"
        " so that it pauses only for a copy within its GPUs; memoryFraction must leave room for the second"
        " copy. Versions that come through host memory are received while the engine pauses",
    )
    deterministic: bool | None = Field(
        None,
        description="kernels whose results do not depend on the batch (SGLang: "
        "enable-deterministic-inference). A replayed step then generates the same tokens, at a third of the "
        "speed and more on GPUs. Default: true on cpu, false on cuda",
    )
    moe_a2a_backend: Literal["none", "deepep"] = Field(
        "none",
        alias="moeA2aBackend",
        description="how tokens reach the GPUs of their experts. none: every GPU gathers all tokens. deepep: "
        "all-to-all by DeepEP, and each GPU has its own copy of the shared experts; the rollout image must "
        "contain DeepEP",
    )
    dp_lm_head: bool = Field(
        False,
        description="each replica of the attention layers computes the logits of its own sequences; needs "
        "attentionDataParallel above 1",
    )
    speculative: Literal["none", "mtp"] = Field(
        "none",
        description="speculative decoding. mtp: the multi-token prediction (MTP) layer drafts tokens, and "
        "the model accepts or replaces each, so that samples keep the policy's distribution. The layer is "
        "updated with every weight version; needs device cuda and model.multiTokenPrediction",
    )
    speculative_num_steps: int = Field(
        3,
        ge=1,
        le=16,
        description="tokens that are drafted one after another before the model verifies them (speculative "
        "mtp only; SGLang: speculative-num-steps)",
    )
    tokenizer: bool = Field(
        False,
        description="load the model's tokenizer; needed for algorithm.stop only: prompts are token ids",
    )
    return_routed_experts: bool = Field(
        False, description="return the selected experts of each token; needed for algorithm.routingReplay"
    )
    routed_experts_gibibytes: int | None = Field(
        None,
        ge=1,
        le=2048,
        description="memory of each pod, within its limit, for the routed experts of samples that no trainer"
        " has read yet: tokens x layers x experts per token bytes (returnRoutedExperts only); default: room"
        " for a step's samples at full length",
    )
    start_seconds: int = Field(
        1800,
        ge=60,
        le=86400,
        description="seconds in which a started server must answer; then its container is started again. A "
        "server reads no weights, unless its pool serves a model: it imports, reserves memory, and compiles "
        "and records kernels, which takes longer with more batch sizes to record and with DeepEP",
    )
    extra_args: list[Annotated[str, Field(max_length=256)]] = Field(
        default_factory=list,
        max_length=64,
        description="additional arguments of sglang.launch_server that no field sets",
    )

    @property
    def is_deterministic(self) -> bool:
        """Return whether results do not depend on the batch: as given, else by device."""
        return self.device is Device.CPU if self.deterministic is None else self.deterministic


_TEMPLATE_RULES: tuple[Rule["RolloutTemplate"], ...] = (
    Rule(
        "self.minAvailable <= self.replicas",
        "minAvailable must not exceed replicas: lower minAvailable or raise replicas",
        lambda template: template.min_available <= template.replicas,
    ),
)


class RolloutTemplate(WithOverlay):
    """Desired engines."""

    rules = _TEMPLATE_RULES
    replicas: int = Field(1, ge=1, le=512, description="number of engines")
    min_available: int = Field(
        1, ge=1, le=512, description="number of engines that a weight version must reach to be committed"
    )
    engine: EngineSpec = Field(default_factory=EngineSpec)
    resources: Resources = Field(default_factory=Resources)
    agent_resources: Resources = Field(
        default_factory=Resources,
        description="resources of the agent beside each engine, which holds a whole version of the weights "
        "with weightSync.mode delta and with transport nixl",
    )
    node_selector: dict[str, str] = Field(
        default_factory=dict, max_length=16, description="labels of the nodes that the pods may run on"
    )
    image: ShortString | None = Field(
        None, description="container image; default: the rollout image of the operator's settings"
    )


class PoolRef(Model):
    """A RolloutPool in the job's namespace."""

    name: Name = Field(description="metadata.name of the RolloutPool")


_ROLLOUT_RULES: tuple[Rule["RolloutSpec"], ...] = (
    Rule(
        "has(self.template) != has(self.poolRef)",
        "set exactly one of template and poolRef",
        lambda rollout: (rollout.template is None) != (rollout.pool_ref is None),
    ),
)


class RolloutSpec(Model):
    """Rollout pool of a job: its own, or an existing one that serves several jobs one after another."""

    rules = _ROLLOUT_RULES
    template: RolloutTemplate | None = Field(
        None, description="engines of the job's own pool, which is deleted with the job"
    )
    pool_ref: PoolRef | None = Field(
        None, description="existing RolloutPool; the job waits while another job writes weights to it"
    )
    over_sample_rate: float = Field(
        0.0,
        ge=0,
        le=4,
        description="share of additional prompts to generate in each step; the step ends with the first "
        "trainBatchSize groups that are complete. The others come first in the next step, which waits for "
        "them; with partialRollouts they continue, else they are generated again. Batches depend on time",
    )
    stall_seconds: int | None = Field(
        None,
        ge=1,
        le=86400,
        description="seconds without a token from any engine, while samples are awaited, after which the job "
        "reports Ready=False; default: restartPolicy.hangSeconds + 60",
    )


class RolloutPoolSpec(RolloutTemplate):
    """Desired engines and their model. In a pool that belongs to a job, the job's settings apply."""

    rules = (*_TEMPLATE_RULES, *SERVE_RULES)
    update_rules = SERVE_UPDATE_RULES
    model: ModelSpec
    serve: ServeSpec | None = None
    weight_sync: WeightSyncSpec = Field(default_factory=WeightSyncSpec)
    scheduling: SchedulingSpec = Field(default_factory=SchedulingSpec)
    upgrade_strategy: Literal["None", "Recreate"] = Field(
        "None",
        description="effect of a changed image. None: only new pods use it. Recreate: replace all pods",
    )


class RolloutPoolStatus(Model):
    """Observed state of the engines."""

    observed_generation: int | None = Field(
        None, description="metadata.generation that this status describes"
    )
    phase: str | None = Field(
        None, max_length=32, description="Invalid, Waiting, Starting, Degraded or Serving"
    )
    replicas: int | None = Field(None, description="number of engines that have a pod")
    ready_replicas: int | None = Field(None, description="number of engines that serve")
    weight_version: int | None = Field(None, description="newest weight version that an engine serves")
    bound_to: str | None = Field(
        None, max_length=253, description="name of the GRPOJob that writes the weights"
    )
    selector: str | None = Field(None, max_length=512, description="label selector of the engines' pods")
    engines: list[EngineStatus] = Field(
        default_factory=list, max_length=512, description="state of each engine, reported by its agent"
    )
    conditions: list[Condition] = Field(
        default_factory=list, max_length=16, description="Ready, Degraded, Reconciling, Stalled"
    )
    images: SettledImages | None = None
    serve: ServeStatus | None = None
