"""GRPOJob: one GRPO post-training run on a training pool and a rollout pool."""

from typing import Literal

from pydantic import Field

from grpo_operator.api.base import Device, Model, Resources, ShortString
from grpo_operator.api.rules import Rule
from grpo_operator.api.v1alpha1.algorithm import AlgorithmSpec, StalenessSpec
from grpo_operator.api.v1alpha1.checkpoint import CheckpointSpec
from grpo_operator.api.v1alpha1.data import GYM, DataSpec, RewardSpec
from grpo_operator.api.v1alpha1.divergence import DivergenceSpec
from grpo_operator.api.v1alpha1.head import HeadSpec
from grpo_operator.api.v1alpha1.job_updates import STOPPED_RULES, UPDATE_RULES
from grpo_operator.api.v1alpha1.model import ModelSpec, WeightSyncSpec
from grpo_operator.api.v1alpha1.object_store import OBJECT_STORE_RULES
from grpo_operator.api.v1alpha1.observability import ObservabilitySpec
from grpo_operator.api.v1alpha1.restart_policy import RestartPolicySpec
from grpo_operator.api.v1alpha1.rolloutpool import EngineSpec, RolloutSpec, RolloutTemplate
from grpo_operator.api.v1alpha1.scheduling import SchedulingSpec, WithOverlay
from grpo_operator.api.v1alpha1.trainer import TrainerSpec
from grpo_operator.api.v1alpha1.validation import VALIDATION_RULES, ValidationSpec


class ControllerSpec(WithOverlay):
    """The controller pod, which runs on a CPU node."""

    resources: Resources = Field(default_factory=Resources)
    node_selector: dict[str, str] = Field(
        default_factory=dict, max_length=16, description="labels of the nodes that the pod may run on"
    )


_NEXT_ENGINE_SECONDS = 60  # in which samples that left a silent engine get tokens from another one

_RULES: tuple[Rule["GRPOJobSpec"], ...] = (
    Rule(
        "self.data.trainBatchSize % self.trainer.miniBatchSize == 0",
        "data.trainBatchSize must be a multiple of trainer.miniBatchSize",
        lambda job: job.data.train_batch_size % job.trainer.mini_batch_size == 0,
    ),
    Rule(
        "!has(self.trainer.maxTokensPerGpu)"
        " || self.data.promptLength + self.data.responseLength"
        " <= self.trainer.maxTokensPerGpu * self.trainer.parallelism.context",
        "data.promptLength + data.responseLength must fit in trainer.maxTokensPerGpu x parallelism.context",
        lambda job: (
            job.trainer.max_tokens_per_gpu is None
            or job.data.total_length <= job.trainer.max_tokens_per_gpu * job.trainer.parallelism.context
        ),
    ),
    Rule(
        "!has(self.trainer.logProbMaxTokensPerGpu)"
        " || self.data.promptLength + self.data.responseLength"
        " <= self.trainer.logProbMaxTokensPerGpu * self.trainer.parallelism.context",
        "data.promptLength + data.responseLength must fit in trainer.logProbMaxTokensPerGpu x"
        " parallelism.context",
        lambda job: (
            job.trainer.log_prob_max_tokens_per_gpu is None
            or job.data.total_length
            <= job.trainer.log_prob_max_tokens_per_gpu * job.trainer.parallelism.context
        ),
    ),
    Rule(
        "!has(self.rollout.template) || self.data.promptLength + self.data.responseLength"
        " <= self.rollout.template.engine.contextLength",
        "data.promptLength + data.responseLength must fit in rollout.template.engine.contextLength",
        lambda job: (
            job.rollout.template is None
            or job.data.total_length <= job.rollout.template.engine.context_length
        ),
    ),
    Rule(
        "has(self.reward) || self.data.train.startsWith('reasoning-gym:')",
        "prompts from files need a reward: set reward.function, reward.builtin, reward.url or reward.model",
        lambda job: job.reward is not None or job.data.train.startswith(GYM),
    ),
    Rule(
        "!self.staleness.partialRollouts || !self.algorithm.routingReplay",
        "staleness.partialRollouts and algorithm.routingReplay cannot be combined: a resumed rollout returns"
        " new routed experts for tokens already generated",
        lambda job: not job.staleness.partial_rollouts or not job.algorithm.routing_replay,
    ),
    Rule(
        "!has(self.reward) || !has(self.reward.model) || !has(self.algorithm.filterGroups)",
        "reward.model scores whole batches, but algorithm.filterGroups needs the score of each group first:"
        " remove one of the two",
        lambda job: job.reward is None or job.reward.model is None or job.algorithm.filter_groups is None,
    ),
    Rule(
        "!self.algorithm.routingReplay || !has(self.rollout.template)"
        " || self.rollout.template.engine.returnRoutedExperts",
        "algorithm.routingReplay needs rollout.template.engine.returnRoutedExperts",
        lambda job: (
            not job.algorithm.routing_replay
            or job.rollout.template is None
            or job.rollout.template.engine.return_routed_experts
        ),
    ),
    Rule(
        "!self.trainer.moe.overlapCommunication || !self.model.multiTokenPrediction",
        "trainer.moe.overlapCommunication excludes model.multiTokenPrediction, whose layer is no part of the"
        " schedule: set one of the two to false",
        lambda job: not (job.trainer.moe.overlap_communication and job.model.multi_token_prediction),
    ),
    Rule(
        "!has(self.rollout.template) || self.rollout.template.engine.speculative == 'none'"
        " || self.model.multiTokenPrediction",
        "rollout.template.engine.speculative mtp needs model.multiTokenPrediction true: the trainer must"
        " load and publish the layer that drafts",
        lambda job: not _drafts(job) or job.model.multi_token_prediction,
    ),
    Rule(
        "!has(self.rollout.template) || self.rollout.template.engine.speculative == 'none'"
        " || self.algorithm.minP == 0.0",
        "rollout.template.engine.speculative mtp excludes algorithm.minP: SGLang verifies drafted tokens"
        " without it: remove one of the two",
        lambda job: not _drafts(job) or job.algorithm.min_p == 0,
    ),
    Rule(
        "!has(self.model.volume) || !has(self.data.volume)"
        " || self.model.volume.mountPath != self.data.volume.mountPath",
        "model.volume.mountPath and data.volume.mountPath must differ",
        lambda job: (
            job.model.volume is None
            or job.data.volume is None
            or job.model.volume.mount_path != job.data.volume.mount_path
        ),
    ),
    Rule(
        "!has(self.algorithm.stop) || size(self.algorithm.stop) == 0 || !has(self.rollout.template)"
        " || self.rollout.template.engine.tokenizer",
        "algorithm.stop needs rollout.template.engine.tokenizer: engines compare texts, not token ids",
        lambda job: (
            not job.algorithm.stop or job.rollout.template is None or job.rollout.template.engine.tokenizer
        ),
    ),
    Rule(
        "!has(self.scheduling.rdma) || self.trainer.device == 'cuda'"
        " || (has(self.rollout.template) && self.rollout.template.engine.device == 'cuda')",
        "scheduling.rdma connects GPU pods, and this job has none: remove it, or set trainer.device or"
        " rollout.template.engine.device to cuda",
        lambda job: (
            job.scheduling.rdma is None
            or job.trainer.device is Device.CUDA
            or (job.rollout.template is not None and job.rollout.template.engine.device is Device.CUDA)
        ),
    ),
    Rule(
        "!has(self.checkpoint.resumeFrom) || !has(self.checkpoint.resumeFrom.step)"
        " || self.checkpoint.resumeFrom.load == 'weights'"
        " || self.totalSteps > self.checkpoint.resumeFrom.step",
        "totalSteps must be larger than checkpoint.resumeFrom.step, whose steps count as finished: raise it,"
        " or set checkpoint.resumeFrom.load to weights",
        lambda job: _leaves_steps(job.checkpoint, job.total_steps),
    ),
    Rule(
        "!has(self.observability.profile) || self.observability.profile.tool != 'nsight'"
        " || self.trainer.device == 'cuda'",
        "observability.profile.tool nsight records GPU activity: use torch where trainer.device is cpu",
        lambda job: (
            job.observability.profile is None
            or job.observability.profile.tool != "nsight"
            or job.trainer.device is Device.CUDA
        ),
    ),
)
# mode: colocated. An engine and the ranks of one training pod use the same GPUs alternately, so that both
# must have the same GPUs and neither may keep memory while the other one computes.
_COLOCATION_RULES: tuple[Rule["GRPOJobSpec"], ...] = (
    Rule(
        "self.mode != 'colocated' || has(self.rollout.template)",
        "mode colocated needs rollout.template: the engines of a RolloutPool have GPUs of their own",
        lambda job: job.mode != "colocated" or job.rollout.template is not None,
    ),
    Rule(
        "self.mode != 'colocated' || !has(self.rollout.template)"
        " || (self.rollout.template.engine.device == self.trainer.device"
        " && self.rollout.template.engine.nodesPerEngine == 1 && (self.trainer.device == 'cpu'"
        " || self.rollout.template.engine.gpusPerNode == self.trainer.gpusPerNode))",
        "mode colocated: rollout.template.engine must have trainer.device, nodesPerEngine 1 and, on cuda,"
        " trainer.gpusPerNode: an engine uses the GPUs of one training pod",
        lambda job: (
            job.mode != "colocated"
            or job.rollout.template is None
            or _same_gpus(job.rollout.template.engine, job.trainer)
        ),
    ),
    Rule(
        "self.mode != 'colocated' || !has(self.rollout.template)"
        " || self.rollout.template.replicas <= self.trainer.nodes",
        "mode colocated: rollout.template.replicas must not exceed trainer.nodes: each training pod shares"
        " its GPUs with at most one engine",
        lambda job: (
            job.mode != "colocated"
            or job.rollout.template is None
            or job.rollout.template.replicas <= job.trainer.nodes
        ),
    ),
    Rule(
        "self.mode != 'colocated' || self.trainer.device == 'cpu' || (self.trainer.offload.parameters"
        " && self.trainer.offload.gradients && self.trainer.offload.optimizer)",
        "mode colocated on cuda needs trainer.offload.parameters, gradients and optimizer: state left on the"
        " GPUs takes memory from the engines",
        lambda job: (
            not job.shares_gpus
            or (
                job.trainer.offload.parameters
                and job.trainer.offload.gradients
                and job.trainer.offload.optimizer
            )
        ),
    ),
    Rule(
        "self.mode != 'colocated' || self.trainer.spareNodes == 0",
        "mode colocated excludes trainer.spareNodes: engines would run on the GPUs of the spare pods: remove"
        " spareNodes",
        lambda job: job.mode != "colocated" or job.trainer.spare_nodes == 0,
    ),
    Rule(
        "self.mode != 'colocated' || self.staleness.maxVersionLag == 0",
        "mode colocated requires staleness.maxVersionLag 0: engines cannot generate while the trainer runs",
        lambda job: job.mode != "colocated" or job.staleness.max_version_lag == 0,
    ),
    Rule(
        "self.mode != 'colocated' || !has(self.rollout.template)"
        " || !self.rollout.template.engine.doubleBuffer",
        "mode colocated excludes engine.doubleBuffer: engines do not generate while a version comes: remove"
        " doubleBuffer",
        lambda job: (
            job.mode != "colocated"
            or job.rollout.template is None
            or not job.rollout.template.engine.double_buffer
        ),
    ),
    Rule(
        "self.mode != 'colocated' || self.weightSync.transport != 'nccl'",
        "mode colocated excludes weightSync.transport nccl, which needs a GPU for each process: remove"
        " transport",
        lambda job: job.mode != "colocated" or job.weight_sync.transport != "nccl",
    ),
    Rule(
        "self.weightSync.transport != 'cuda-ipc'"
        " || (self.mode == 'colocated' && self.trainer.device == 'cuda' && self.trainer.nodes == 1)",
        "weightSync.transport cuda-ipc needs mode colocated on cuda and trainer.nodes 1: CUDA IPC works"
        " within one host only",
        lambda job: job.weight_sync.transport != "cuda-ipc" or (job.shares_gpus and job.trainer.nodes == 1),
    ),
)


def _leaves_steps(checkpoint: CheckpointSpec, total_steps: int) -> bool:
    source = checkpoint.resume_from
    return source is None or source.load == "weights" or total_steps > (source.step or 0)


def _drafts(job: "GRPOJobSpec") -> bool:
    template = job.rollout.template
    return template is not None and template.engine.speculative != "none"


def _same_gpus(engine: EngineSpec, trainer: TrainerSpec) -> bool:
    same_count = trainer.device is Device.CPU or engine.gpus_per_node == trainer.gpus_per_node
    return engine.device is trainer.device and engine.nodes_per_engine == 1 and same_count


class GRPOJobSpec(Model):
    """Desired training run."""

    rules = (*_RULES, *VALIDATION_RULES, *OBJECT_STORE_RULES, *_COLOCATION_RULES)
    update_rules = UPDATE_RULES
    object_rules = STOPPED_RULES
    model: ModelSpec
    data: DataSpec
    staleness: StalenessSpec = Field(default_factory=StalenessSpec)
    reward: RewardSpec | None = Field(
        None, description="reward of the responses; default: the task's built-in verifier"
    )
    algorithm: AlgorithmSpec = Field(default_factory=AlgorithmSpec)
    validation: ValidationSpec | None = Field(None, description="default: no validation")
    divergence: DivergenceSpec | None = Field(None, description="default: no metric ends the job")
    controller: ControllerSpec = Field(default_factory=ControllerSpec)
    head: HeadSpec = Field(default_factory=HeadSpec)
    trainer: TrainerSpec
    rollout: RolloutSpec
    mode: Literal["static", "colocated"] = Field(
        "static",
        description="static: trainer and engines have separate GPUs. colocated: each engine shares the GPUs "
        "of a training pod, and the two use them alternately; the pod must have all GPUs of its node",
    )
    weight_sync: WeightSyncSpec = Field(default_factory=WeightSyncSpec)
    checkpoint: CheckpointSpec
    restart_policy: RestartPolicySpec = Field(default_factory=RestartPolicySpec)
    scheduling: SchedulingSpec = Field(default_factory=SchedulingSpec)
    observability: ObservabilitySpec = Field(default_factory=ObservabilitySpec)
    total_steps: int = Field(
        ge=1, le=10**7, description="number of training steps; each uses one batch of prompts"
    )
    seed: int = Field(0, ge=0, le=2**31 - 1, description="random seed of weights, prompts and sampling")
    suspend: bool = Field(
        False,
        description="true: save a checkpoint, then delete all pods. false: run the job, from "
        "its last checkpoint if it has one",
    )
    ttl_seconds_after_finished: int | None = Field(
        None, ge=0, le=10**8, description="seconds from the end of the job to its deletion; default: never"
    )
    image: ShortString | None = Field(
        None,
        description="trainer and controller image; default: the trainer image of the operator's settings",
    )
    upgrade_strategy: Literal["None", "Recreate"] = Field(
        "None",
        description="effect of a changed image. None: only new pods use it. Recreate: replace all pods at "
        "once and resume from the last checkpoint",
    )
    cleanup_policy: Literal["None", "Workers", "All"] = Field(
        "Workers",
        description="cleanup after the job has ended. None: keep all pods. Workers: delete the pods. All: "
        "also delete the RayCluster",
    )
    managed_by: Literal["rl.grpo.dev/grpo-operator", "kueue.x-k8s.io/multikueue"] = Field(
        "rl.grpo.dev/grpo-operator",
        description="controller that reconciles this job; this operator ignores jobs with any other value",
    )

    @property
    def stall_seconds(self) -> int:
        """Return the seconds without a token after which the job reports Ready=False.

        By default samples first leave an engine that is silent for ``hangSeconds``.
        """
        return self.rollout.stall_seconds or self.restart_policy.hang_limit + _NEXT_ENGINE_SECONDS

    @property
    def updates(self) -> int:
        """Return the number of optimizer steps of the whole job."""
        return self.total_steps * (self.data.train_batch_size // self.trainer.mini_batch_size)

    @property
    def shares_gpus(self) -> bool:
        """Return whether trainer and engines share GPUs. On CPUs, colocated pods only share a node."""
        return self.mode == "colocated" and self.trainer.device is Device.CUDA

    @property
    def fills_engines_from_store(self) -> bool:
        """Return whether engines read weights from the checkpoint store if nobody else has them.

        Engines of a shared pool do not know the store. Colocated ones wait for the trainers' next version.
        Those of a job with an object store do not mount it.
        """
        in_files = self.checkpoint.store.uri is None
        return in_files and self.rollout.template is not None and self.mode != "colocated"


def check_context(data: DataSpec, pool: RolloutTemplate, field: str) -> None:
    """Raise ValueError if prompt and response do not fit in the context length of a pool's engines.

    ``field``: name of the context length in the message.
    """
    if data.total_length > pool.engine.context_length:
        raise ValueError(
            f"data.promptLength + data.responseLength = {data.total_length} exceeds "
            f"{field} ({pool.engine.context_length})"
        )
