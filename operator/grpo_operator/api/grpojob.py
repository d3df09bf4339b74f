"""GRPOJob: one GRPO post-training run over a training pool and a rollout pool."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from grpo_operator.api.base import Device, Model, Name, Path, Resources, ShortString
from grpo_operator.api.gpus import GpuType
from grpo_operator.api.layout import Layout
from grpo_operator.api.model import ModelSpec, WeightSyncSpec
from grpo_operator.api.rolloutpool import RolloutTemplate
from grpo_operator.api.scheduling import SchedulingSpec, WithOverlay
from grpo_operator.api.status import CheckpointStatus, Condition, LayoutStatus, PoolCount, RestartCounts


class DataSpec(Model):
    """Prompts."""

    train: ShortString = Field(
        pattern=r"^reasoning-gym:[a-z0-9_]+(\?[a-z0-9_=&.-]+)?$",
        description="reasoning-gym:TASK?key=value&...: a seeded, endless task with its own verifier",
    )
    prompt_length: int = Field(512, ge=8, le=1048576, description="longest prompt, in tokens")
    response_length: int = Field(512, ge=1, le=1048576, description="longest response, in tokens")
    train_batch_size: int = Field(128, ge=1, le=65536, description="prompts of one step")


class KlControl(Model):
    """Weight of the KL term (verl: algorithm.kl_ctrl)."""

    type: Literal["fixed", "adaptive"] = "fixed"
    kl_coef: float = Field(0.001, ge=0, le=10)
    target_kl: float = Field(0.1, gt=0, le=100, description="adaptive only: KL to hold, in nats")
    horizon: int = Field(10000, ge=1, le=10**9, description="adaptive only: samples to adapt over")


class AlgorithmSpec(Model):
    """GRPO; keys named as in verl where YAML allows."""

    adv_estimator: Literal["grpo"] = "grpo"
    samples_per_prompt: int = Field(
        16, ge=2, le=1024, description="group size (verl: rollout.n; YAML reads a bare n as false)"
    )
    temperature: float = Field(1.0, gt=0, le=10)
    norm_adv_by_std: bool = Field(True, description="divide by the group's standard deviation")
    clip_ratio_low: float = Field(0.2, gt=0, lt=1)
    clip_ratio_high: float = Field(0.2, gt=0, le=10)
    clip_ratio_c: float = Field(3.0, gt=1, le=100, description="dual clip for negative advantages")
    use_kl_loss: bool = True
    kl_loss_type: Literal["k1", "k2", "k3"] = "k3"
    kl_ctrl: KlControl = Field(default_factory=KlControl)
    loss_agg_mode: Literal["token-mean", "seq-mean-token-mean"] = "token-mean"


class OptimizerSpec(Model):
    """Adam with Megatron-Core's distributed optimizer."""

    lr: float = Field(1e-6, ge=0, le=1)
    min_lr: float = Field(0.0, ge=0, le=1)
    lr_warmup_steps: int = Field(0, ge=0, le=10**7)
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    weight_decay: float = Field(0.01, ge=0, le=1)
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    adam_beta2: float = Field(0.95, ge=0, lt=1)
    clip_grad: float = Field(1.0, gt=0, le=1000)


class ParallelismSpec(Model):
    """Sizes of Megatron-Core's parallel axes. Sequence parallelism is on whenever tensor > 1."""

    cel = (
        (
            "!self.auto || (self.tensor == 1 && self.pipeline == 1 && self.context == 1"
            " && self.expert == 1 && self.expertTensor == 1"
            " && !has(self.layersInFirstStage) && !has(self.layersInLastStage))",
            "auto chooses every size: remove the sizes, or set auto to false",
        ),
        (
            "self.pipeline > 1 || (!has(self.layersInFirstStage) && !has(self.layersInLastStage))",
            "layersInFirstStage and layersInLastStage need pipeline > 1",
        ),
    )
    auto: bool = Field(False, description="let the operator choose, by memory and estimated step time")
    tensor: int = Field(1, ge=1, le=64, description="GPUs that share every matrix (TP)")
    pipeline: int = Field(1, ge=1, le=128, description="stages of layers (PP)")
    context: int = Field(1, ge=1, le=64, description="GPUs that share a sequence (CP)")
    expert: int = Field(1, ge=1, le=512, description="GPUs over which experts are dealt out (EP)")
    expert_tensor: int = Field(1, ge=1, le=64, description="GPUs that share one expert (ETP)")
    layers_in_first_stage: int | None = Field(None, ge=1, le=512, description="default: as the others")
    layers_in_last_stage: int | None = Field(None, ge=1, le=512, description="default: as the others")

    def layout(self, world: int) -> Layout:
        """The layout of ``world`` ranks.

        Raises ValueError when the sizes do not multiply up to it.
        """
        return Layout(world=world, **self.model_dump(exclude={"auto"}))


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
    )
    nodes: int = Field(ge=1, le=4096, description="pods of the training pool")
    gpus_per_node: int = Field(8, ge=1, le=16, description="ranks of a pod, one GPU each on cuda")
    device: Device = Field(Device.CUDA, description="cuda or cpu")
    gpu_type: GpuType = Field(GpuType.H100, description="what the planner counts with (cuda only)")
    recompute: Literal["none", "full"] = Field(
        "full", description="full: keep only each layer's input for the backward pass"
    )
    parallelism: ParallelismSpec = Field(default_factory=ParallelismSpec)
    optimizer: OptimizerSpec = Field(default_factory=OptimizerSpec)
    mini_batch_size: int = Field(128, ge=1, le=65536, description="prompts of one optimizer step")
    micro_batch_size_per_gpu: int = Field(1, ge=1, le=65536, description="sequences of one forward")
    resources: Resources = Field(default_factory=lambda: Resources(cpu="1", memory="4Gi"))
    node_selector: dict[str, str] = Field(default_factory=dict, max_length=16)

    @model_validator(mode="after")
    def _check(self) -> "TrainerSpec":
        self.parallelism.layout(self.world)  # raises when the sizes do not multiply up
        return self

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.nodes * self.gpus_per_node


class PoolRef(Model):
    """A RolloutPool of the job's namespace."""

    name: Name


class RolloutSpec(Model):
    """The rollout pool: one of the job's own, or one that serves several jobs in turn."""

    cel = (("has(self.template) != has(self.poolRef)", "set exactly one of template and poolRef"),)
    template: RolloutTemplate | None = Field(None, description="a pool that lives and ends with the job")
    pool_ref: PoolRef | None = Field(
        None, description="a RolloutPool that exists; the job waits while another job writes to it"
    )

    @model_validator(mode="after")
    def _check(self) -> "RolloutSpec":
        if (self.template is None) == (self.pool_ref is None):
            raise ValueError("set exactly one of template and poolRef")
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


class CheckpointSpec(Model):
    """Distributed checkpoints."""

    store: StoreSpec
    every_steps: int = Field(10, ge=1, le=10**6, description="steps between two checkpoints")
    keep: int = Field(2, ge=1, le=1000, description="complete checkpoints to keep")


class RestartPolicySpec(Model):
    """When the job gives up."""

    max_restarts: int = Field(10, ge=0, le=10**6, description="restarts caused by the job itself")
    backoff_seconds: int = Field(5, ge=0, le=3600, description="first delay; doubles up to 5 minutes")


class ControllerSpec(WithOverlay):
    """The single controller, on a CPU node."""

    resources: Resources = Field(default_factory=lambda: Resources(cpu="1", memory="2Gi"))
    node_selector: dict[str, str] = Field(default_factory=dict, max_length=16)


class ProfileSpec(Model):
    """Traces of torch's profiler, written to the store's ``profile`` folder."""

    cel = (("self.stepStart <= self.stepEnd", "stepStart must not exceed stepEnd"),)
    ranks: list[Annotated[int, Field(ge=0, le=65535)]] = Field(
        default_factory=lambda: [0], min_length=1, max_length=64, description="trainer ranks to trace"
    )
    step_start: int = Field(ge=1, le=10**7, description="first step to trace")
    step_end: int = Field(ge=1, le=10**7, description="last step to trace")

    @model_validator(mode="after")
    def _check(self) -> "ProfileSpec":
        if self.step_start > self.step_end:
            raise ValueError(f"stepStart ({self.step_start}) must not exceed stepEnd ({self.step_end})")
        return self


class ObservabilitySpec(Model):
    """Where metrics go besides status."""

    tensorboard: bool = True
    profile: ProfileSpec | None = None


class GRPOJobSpec(Model):
    """Desired run."""

    cel = (
        (
            "self.data.trainBatchSize % self.trainer.miniBatchSize == 0",
            "data.trainBatchSize must be a multiple of trainer.miniBatchSize",
        ),
        (
            "!has(self.rollout.template) || self.data.promptLength + self.data.responseLength"
            " <= self.rollout.template.engine.contextLength",
            "data.promptLength + data.responseLength must fit in rollout.template.engine.contextLength",
        ),
        (
            "oldSelf.model == self.model && oldSelf.data == self.data && oldSelf.seed == self.seed"
            " && oldSelf.trainer == self.trainer && oldSelf.algorithm == self.algorithm"
            " && oldSelf.checkpoint.store == self.checkpoint.store",
            "model, data, seed, trainer, algorithm and checkpoint.store are fixed once the job"
            " exists: create a new job",
        ),
        (
            "has(oldSelf.rollout.poolRef) == has(self.rollout.poolRef)"
            " && (!has(self.rollout.poolRef) || oldSelf.rollout.poolRef == self.rollout.poolRef)",
            "rollout.poolRef is fixed once the job exists: create a new job",
        ),
        ("oldSelf.managedBy == self.managedBy", "managedBy is fixed once the job exists"),
    )
    model: ModelSpec
    data: DataSpec
    algorithm: AlgorithmSpec = Field(default_factory=AlgorithmSpec)
    controller: ControllerSpec = Field(default_factory=ControllerSpec)
    trainer: TrainerSpec
    rollout: RolloutSpec
    weight_sync: WeightSyncSpec = Field(default_factory=WeightSyncSpec)
    checkpoint: CheckpointSpec
    restart_policy: RestartPolicySpec = Field(default_factory=RestartPolicySpec)
    scheduling: SchedulingSpec = Field(default_factory=SchedulingSpec)
    observability: ObservabilitySpec = Field(default_factory=ObservabilitySpec)
    total_steps: int = Field(ge=1, le=10**7)
    seed: int = Field(0, ge=0, le=2**31 - 1)
    suspend: bool = False
    ttl_seconds_after_finished: int | None = Field(None, ge=0, le=10**8)
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
        if self.rollout.template:
            check_context(self.data, self.rollout.template, "rollout.template.engine.contextLength")
        return self


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


class GRPOJobStatus(Model):
    """Observed run."""

    observed_generation: int | None = None
    phase: str | None = None
    step: int | None = None
    total_steps: int | None = None
    progress: str | None = Field(None, max_length=32, description="step/totalSteps")
    weight_version: int | None = None
    reward_mean: str | None = Field(None, max_length=32, description="mean reward of the last step")
    tokens_per_second_per_gpu: str | None = Field(None, max_length=32)
    last_checkpoint: CheckpointStatus | None = None
    train: PoolCount | None = None
    rollout: PoolCount | None = None
    restarts: RestartCounts | None = None
    attempt: int | None = None
    layout: LayoutStatus | None = None
    started_at: str | None = Field(None, max_length=32)
    finished_at: str | None = Field(None, max_length=32)
    conditions: list[Condition] = Field(default_factory=list, max_length=16)
    train_ready: str | None = Field(None, max_length=16)
    rollout_ready: str | None = Field(None, max_length=16)
    weights: str | None = Field(None, max_length=16)
