"""Host memory that the containers of a job need (pure).

Sizes of model state are computed; those of processes are assumed, because nothing measures them yet.
"""

from dataclasses import dataclass

from grpo_operator.api.base import Device
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.rolloutpool import RolloutTemplate
from grpo_operator.plan.planner.model import parameters
from grpo_operator.plan.planner.model.shape import ModelShape
from grpo_operator.plan.planner.training.memory import StageMemory
from grpo_operator.plan.weight_path import job_weight_path

_GIB = 2**30
PROCESS = 6 * _GIB  # of a rank or of an engine's scheduler: CUDA, libraries, pinned buffers (assumed)
_CONTROLLER, _TOKEN = 4 * _GIB, 64  # the process, and bytes of one padded token of a batch (assumed)
_HEAD, _ACTOR = 2 * _GIB, 8 * 2**20  # Ray's head, and what it keeps of one rank (assumed)
AGENT_MEMORY = _GIB // 2  # two chunks, the plan of a version of 100 000 slices, and the process (measured)
_NCCL, _BATCH_TOKEN = 1 * _GIB, 40  # /dev/shm: of one rank, and of one padded token of a batch (assumed)
_BF16, _FP32 = 2, 4
_SAVED = 3 * _FP32  # main weight and two moments of a parameter


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes of one container each.

    ``trainer``: the ranks of a training pod, of which ``moved`` is offloaded state, ``saving`` a checkpoint
    that is written, ``copies`` the memory tier, ``staged`` weight versions. ``engine``: an engine's server in
    one pod. ``agent``: a rollout agent, with a whole version if it is to apply deltas or read over NIXL.
    ``shared``: /dev/shm of a training pod, of which ``batch`` is a step's batch.
    """

    trainer: int
    moved: int
    saving: int
    copies: int
    staged: int
    engine: int
    agent: int
    controller: int
    head: int
    shared: int
    batch: int


def host_memory(
    spec: GRPOJobSpec, pool: RolloutTemplate, model: ModelShape, stages: tuple[StageMemory, ...], fp8: bool
) -> HostMemory:
    """Return the host memory of a planned job with GPUs."""
    trainer, engine = spec.trainer, pool.engine
    ranks = trainer.gpus_per_node
    models = 2 if spec.algorithm.critic else 1
    parameters_of_rank = max(_local(stage, models, spec) for stage in stages)
    moved = ranks * max(stage.host for stage in stages)
    shard = max(stage.optimizer_shard for stage in stages) * 7 // 6  # with the weights in bf16
    # A checkpoint that loads in any layout is gathered on every rank in fp32; each rank then copies its part.
    saving = ranks * (_SAVED * parameters_of_rank + shard)
    tier = spec.checkpoint.memory
    copies = ranks * shard * (1 + tier.replicas) if tier else 0
    version = parameters.model_bytes(model, fp8, spec.model.multi_token_prediction)
    staged = 2 * version // trainer.nodes  # the version that engines read, and the next one
    tokens = batch_tokens(spec)
    return HostMemory(
        trainer=ranks * PROCESS + moved + saving + copies + staged,
        moved=moved,
        saving=saving,
        copies=copies,
        staged=staged,
        engine=engine.gpus_per_node * PROCESS,
        agent=AGENT_MEMORY + (version if keeps_versions(spec, pool) else 0),
        controller=controller_memory(tokens),
        head=head_memory(trainer.world),
        shared=ranks * _NCCL + _BATCH_TOKEN * tokens,
        batch=_BATCH_TOKEN * tokens,
    )


def keeps_versions(spec: GRPOJobSpec, pool: RolloutTemplate) -> bool:
    """Return whether agents hold whole versions: deltas change the one before, and NIXL reads whole blobs."""
    path = job_weight_path(spec, pool)
    return path.delta or path.staged == "nixl"


def batch_tokens(spec: GRPOJobSpec) -> int:
    """Return the padded tokens of a step."""
    return spec.data.train_batch_size * spec.algorithm.samples_per_prompt * spec.data.total_length


def controller_memory(tokens: int) -> int:
    """Return the bytes of the controller in a job of ``tokens`` padded tokens a step."""
    return _CONTROLLER + _TOKEN * tokens


def head_memory(ranks: int) -> int:
    """Return the bytes of Ray's head in a job of ``ranks`` ranks."""
    return _HEAD + _ACTOR * ranks


def _local(stage: StageMemory, models: int, spec: GRPOJobSpec) -> int:
    """Return the trained parameters on one rank of a stage."""
    resident = 1 if spec.trainer.offload.parameters else models
    return stage.weights // _BF16 * models // resident


def shortages(spec: GRPOJobSpec, pool: RolloutTemplate, need: HostMemory, given: dict[str, int]) -> list[str]:
    """Return why given memory is too small. ``given``: bytes by field; absent fields are not checked.

    Only what is computed refuses a job: sizes of processes are assumed.
    """
    state = need.moved + need.saving + need.copies + need.staged
    wanted = {
        "spec.trainer.resources.memory": (state, need.trainer),
        "spec.controller.resources.memory": (need.controller - _CONTROLLER, need.controller),
        "spec.scheduling.sharedMemory": (need.batch, need.shared),
    }
    if pool.engine.device is not Device.CUDA or spec.trainer.device is not Device.CUDA:
        return []
    return [
        f"{field}={_gib(given[field])}: data alone take {_gib(least)}: set it to {_gib(planned)}, or see the "
        "parts with grpo-plan"
        for field, (least, planned) in wanted.items()
        if field in given and given[field] < least
    ]


def _gib(size: int) -> str:
    return f"{-(-size // _GIB)}Gi"
