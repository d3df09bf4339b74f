"""GRPOJob: one GRPO post-training run over a training pool and a rollout pool."""

from typing import Literal

from pydantic import Field, model_validator

from grpo_operator.api.base import Device, Model, Name, Path, Resources, ShortString
from grpo_operator.api.v1alpha1 import colocation
from grpo_operator.api.v1alpha1.algorithm import AlgorithmSpec
from grpo_operator.api.v1alpha1.data import GYM, DataSpec, RewardSpec
from grpo_operator.api.v1alpha1.model import ModelSpec, WeightSyncSpec
from grpo_operator.api.v1alpha1.observability import ObservabilitySpec
from grpo_operator.api.v1alpha1.rolloutpool import RolloutTemplate
from grpo_operator.api.v1alpha1.scheduling import SchedulingSpec, WithOverlay
from grpo_operator.api.v1alpha1.trainer import TrainerSpec

_NSIGHT = "observability.profile.tool nsight captures what GPUs do: use torch where trainer.device is cpu"

_SAME_MOUNT = "model.volume.mountPath and data.volume.mountPath must differ"
_TOKENIZER = "algorithm.stop needs rollout.template.engine.tokenizer: engines compare texts"


class PoolRef(Model):
    """A RolloutPool of the job's namespace."""

    name: Name = Field(description="metadata.name of the RolloutPool")


class RolloutSpec(Model):
    """The rollout pool: one of the job's own, or one that serves several jobs in turn."""

    cel = (("has(self.template) != has(self.poolRef)", "set exactly one of template and poolRef"),)
    template: RolloutTemplate | None = Field(None, description="a pool that lives and ends with the job")
    pool_ref: PoolRef | None = Field(
        None, description="a RolloutPool that exists; the job waits while another job writes to it"
    )
    stall_seconds: int | None = Field(
        None,
        ge=1,
        le=86400,
        description="seconds without an accepted sample, while some are awaited, after which the job is not "
        "Ready and says why; default: 300, or what an answer of full length takes at 10 tokens a second",
    )

    @model_validator(mode="after")
    def _check(self) -> "RolloutSpec":
        if (self.template is None) == (self.pool_ref is None):
            raise ValueError("set exactly one of template and poolRef")
        return self


class StalenessSpec(Model):
    """How old the weights may be that a step's samples come from."""

    cel = (("!self.partialRollouts || self.maxVersionLag > 0", "partialRollouts needs maxVersionLag 1"),)
    max_version_lag: int = Field(
        0,
        ge=0,
        le=1,
        description="0: on-policy. 1: the next step's samples are generated while a step is trained on",
    )
    partial_rollouts: bool = Field(
        False,
        description="answers under way when the weights change go on with the new ones instead of holding "
        "the change up; the ledger says which tokens come from which version",
    )

    @model_validator(mode="after")
    def _check(self) -> "StalenessSpec":
        if self.partial_rollouts and self.max_version_lag == 0:
            raise ValueError("partialRollouts needs maxVersionLag 1")
        return self


class StoreSpec(Model):
    """Where checkpoints and logs are kept. Exactly one of path and pvc."""

    cel = (("has(self.path) != has(self.pvc)", "set exactly one of path and pvc"),)
    path: Path | None = Field(None, pattern=r"^/.+$", description="absolute path on every node")
    pvc: Name | None = Field(None, description="name of a ReadWriteMany PersistentVolumeClaim")

    @model_validator(mode="after")
    def _check(self) -> "StoreSpec":
        if (self.path is None) == (self.pvc is None):
            raise ValueError("set exactly one of path and pvc")
        return self


class MemoryTierSpec(Model):
    """Copies of the training state in the memory of the training pods (trainer.resources.memory must
    hold them), for restarts that lose fewer steps than the store's checkpoints."""

    every_steps: int = Field(1, ge=1, le=10**6, description="steps between two copies")
    replicas: int = Field(
        1, ge=0, le=3, description="other pods that hold each rank's copy: so many pods may be lost at once"
    )


class CheckpointSpec(Model):
    """Distributed checkpoints."""

    store: StoreSpec
    every_steps: int = Field(10, ge=1, le=10**6, description="steps between two checkpoints")
    keep: int = Field(2, ge=1, le=1000, description="complete checkpoints to keep")
    memory: MemoryTierSpec | None = None
    export_every_steps: int | None = Field(
        None, ge=1, le=10**6, description="steps between two Hugging Face directories; default: none"
    )
    export_quantization: Literal["none", "fp8-block128"] = Field(
        "none", description="form of exported weights: as trained, or FP8 with blocks as DeepSeek-V3 has them"
    )
    export_at_end: bool = Field(False, description="write a Hugging Face directory after the last step")


class RestartPolicySpec(Model):
    """When the job gives up."""

    max_restarts: int = Field(10, ge=0, le=10**6, description="restarts caused by the job itself")
    max_same_failures: int = Field(
        3, ge=1, le=1000, description="failures of the job itself with the same cause that end it"
    )
    backoff_seconds: int = Field(5, ge=0, le=3600, description="first delay; doubles up to 5 minutes")


class ControllerSpec(WithOverlay):
    """The single controller, on a CPU node."""

    resources: Resources = Field(default_factory=lambda: Resources(cpu="1", memory="2Gi"))
    node_selector: dict[str, str] = Field(
        default_factory=dict, max_length=16, description="labels of the nodes to use"
    )


class GRPOJobSpec(Model):
    """Desired run."""

    cel = (
        (
            "self.data.trainBatchSize % self.trainer.miniBatchSize == 0",
            "data.trainBatchSize must be a multiple of trainer.miniBatchSize",
        ),
        (
            "!has(self.trainer.maxTokensPerGpu)"
            " || self.data.promptLength + self.data.responseLength <= self.trainer.maxTokensPerGpu",
            "data.promptLength + data.responseLength must fit in trainer.maxTokensPerGpu",
        ),
        (
            "!has(self.rollout.template) || self.data.promptLength + self.data.responseLength"
            " <= self.rollout.template.engine.contextLength",
            "data.promptLength + data.responseLength must fit in rollout.template.engine.contextLength",
        ),
        (
            "has(self.reward) || self.data.train.startsWith('reasoning-gym:')",
            "prompts from files need a reward: set reward.function, reward.builtin, reward.url or "
            "reward.model",
        ),
        (
            "!self.staleness.partialRollouts || !self.algorithm.routingReplay",
            "partialRollouts and routingReplay exclude each other: an answer that goes on says its experts "
            "anew",
        ),
        (
            "!has(self.reward) || !has(self.reward.model) || !has(self.algorithm.filterGroups)",
            "reward.model judges whole batches: remove algorithm.filterGroups, which needs scores before",
        ),
        (
            "!self.algorithm.routingReplay || !has(self.rollout.template)"
            " || self.rollout.template.engine.returnRoutedExperts",
            "algorithm.routingReplay needs rollout.template.engine.returnRoutedExperts",
        ),
        (
            "oldSelf.model == self.model && oldSelf.data == self.data && oldSelf.seed == self.seed"
            " && oldSelf.trainer == self.trainer && oldSelf.algorithm == self.algorithm"
            " && oldSelf.staleness == self.staleness && has(oldSelf.reward) == has(self.reward)"
            " && (!has(self.reward) || oldSelf.reward == self.reward)"
            " && oldSelf.checkpoint.store == self.checkpoint.store",
            "model, data, reward, seed, trainer, algorithm, staleness and checkpoint.store are fixed once"
            " the job exists: create a new job",
        ),
        (
            "has(oldSelf.rollout.poolRef) == has(self.rollout.poolRef)"
            " && (!has(self.rollout.poolRef) || oldSelf.rollout.poolRef == self.rollout.poolRef)",
            "rollout.poolRef is fixed once the job exists: create a new job",
        ),
        (
            "!has(self.model.volume) || !has(self.data.volume)"
            " || self.model.volume.mountPath != self.data.volume.mountPath",
            _SAME_MOUNT,
        ),
        (
            "!has(self.algorithm.stop) || size(self.algorithm.stop) == 0 || !has(self.rollout.template)"
            " || self.rollout.template.engine.tokenizer",
            _TOKENIZER,
        ),
        ("oldSelf.mode == self.mode", "mode is fixed once the job exists: create a new job"),
        ("oldSelf.managedBy == self.managedBy", "managedBy is fixed once the job exists"),
        (
            "!has(self.observability.profile) || self.observability.profile.tool != 'nsight'"
            " || self.trainer.device == 'cuda'",
            _NSIGHT,
        ),
        *colocation.CEL,
    )
    model: ModelSpec
    data: DataSpec
    staleness: StalenessSpec = Field(default_factory=StalenessSpec)
    reward: RewardSpec | None = Field(None, description="default: the task's own verifier")
    algorithm: AlgorithmSpec = Field(default_factory=AlgorithmSpec)
    controller: ControllerSpec = Field(default_factory=ControllerSpec)
    trainer: TrainerSpec
    rollout: RolloutSpec
    mode: Literal["static", "colocated"] = Field(
        "static",
        description="static: trainers and engines have GPUs of their own. colocated: each engine takes turns "
        "with a training pod on that pod's GPUs, which must be all of its node's",
    )
    weight_sync: WeightSyncSpec = Field(default_factory=WeightSyncSpec)
    checkpoint: CheckpointSpec
    restart_policy: RestartPolicySpec = Field(default_factory=RestartPolicySpec)
    scheduling: SchedulingSpec = Field(default_factory=SchedulingSpec)
    observability: ObservabilitySpec = Field(default_factory=ObservabilitySpec)
    total_steps: int = Field(ge=1, le=10**7, description="steps to train: one batch of prompts each")
    seed: int = Field(0, ge=0, le=2**31 - 1, description="of weights, prompts and samples")
    suspend: bool = Field(False, description="save a checkpoint and release every pod; false: go on from it")
    ttl_seconds_after_finished: int | None = Field(
        None, ge=0, le=10**8, description="seconds after its end until the job is deleted; default: never"
    )
    image: ShortString | None = Field(None, description="trainer and controller image")
    upgrade_strategy: Literal["None", "Recreate"] = Field(
        "None",
        description="after a change of image: new pods alone get it, or all pods are replaced at once "
        "and the job goes on from its checkpoint",
    )
    cleanup_policy: Literal["None", "Workers", "All"] = Field(
        "Workers", description="after the end: keep the pods, end them, or delete the RayCluster too"
    )
    managed_by: Literal["rl.grpo.dev/grpo-operator", "kueue.x-k8s.io/multikueue"] = Field(
        "rl.grpo.dev/grpo-operator", description="who reconciles this job; another value: not this operator"
    )

    @model_validator(mode="after")
    def _check(self) -> "GRPOJobSpec":
        if self.data.train_batch_size % self.trainer.mini_batch_size:
            raise ValueError(
                f"data.trainBatchSize ({self.data.train_batch_size}) must be a multiple of "
                f"trainer.miniBatchSize ({self.trainer.mini_batch_size})"
            )
        if self.reward is None and not self.data.train.startswith(GYM):
            raise ValueError(
                f"data.train={self.data.train}: prompts from files need a reward: set reward.function, "
                "reward.builtin, reward.url or reward.model"
            )
        longest, room = self.data.prompt_length + self.data.response_length, self.trainer.max_tokens_per_gpu
        if room is not None and longest > room:
            raise ValueError(
                f"data.promptLength + data.responseLength = {longest} exceeds "
                f"trainer.maxTokensPerGpu ({room})"
            )
        if self.staleness.partial_rollouts and self.algorithm.routing_replay:
            raise ValueError(
                "staleness.partialRollouts and algorithm.routingReplay exclude each other: an answer that "
                "goes on says its experts anew"
            )
        if self.reward and self.reward.model and self.algorithm.filter_groups:
            raise ValueError(
                "reward.model judges whole batches: remove algorithm.filterGroups, which needs scores before"
            )
        template = self.rollout.template
        if self.algorithm.routing_replay and template and not template.engine.return_routed_experts:
            raise ValueError(
                "algorithm.routingReplay=true needs rollout.template.engine.returnRoutedExperts=true"
            )
        if self.rollout.template:
            check_context(self.data, self.rollout.template, "rollout.template.engine.contextLength")
        profile = self.observability.profile
        if profile and profile.tool == "nsight" and self.trainer.device is Device.CPU:
            raise ValueError(_NSIGHT)
        volumes = (self.model.volume, self.data.volume)
        if volumes[0] and volumes[1] and volumes[0].mount_path == volumes[1].mount_path:
            raise ValueError(_SAME_MOUNT)
        if self.algorithm.stop and template and not template.engine.tokenizer:
            raise ValueError(_TOKENIZER)
        colocation.check(self)
        return self

    @property
    def stall_seconds(self) -> int:
        """Seconds without a sample after which the job does not get on."""
        return self.rollout.stall_seconds or max(300, self.data.response_length // 10)

    @property
    def shares_gpus(self) -> bool:
        """Do trainers and engines take turns on GPUs? On CPUs they are only placed side by side."""
        return self.mode == "colocated" and self.trainer.device is Device.CUDA


def check_context(data: DataSpec, pool: RolloutTemplate, field: str) -> None:
    """Prompt and response must fit into an engine.

    Raises ValueError.
    """
    needed = data.prompt_length + data.response_length
    if needed > pool.engine.context_length:
        raise ValueError(
            f"data.promptLength + data.responseLength = {needed} exceeds "
            f"{field} ({pool.engine.context_length})"
        )
