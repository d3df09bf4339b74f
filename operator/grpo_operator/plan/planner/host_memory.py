"""Host memory that the containers of a job need (pure).

Sizes of model state are computed; those of processes are assumed, because nothing measures them yet.
"""

from dataclasses import dataclass

from grpo_operator.api.base import Device
from grpo_operator.api.v1alpha1.checkpoint import EXPORT_FILE_BYTES
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.rolloutpool import RolloutPoolSpec, RolloutTemplate
from grpo_operator.plan.capacity.feasibility import quantity
from grpo_operator.plan.planner import agent_memory
from grpo_operator.plan.planner.agent_memory import AGENT_MEMORY
from grpo_operator.plan.planner.model import parameters
from grpo_operator.plan.planner.model.shape import ModelShape
from grpo_operator.plan.planner.training.memory import StageMemory
from grpo_operator.plan.planner.training.offloaded import PINNED
from grpo_operator.plan.weight_path import job_weight_path, pool_weight_path

_GIB = 2**30
PROCESS = 6 * _GIB  # of a rank or of an engine's scheduler: CUDA, libraries, pinned buffers (assumed)
_CONTROLLER, _TOKEN = 4 * _GIB, 64  # the process, and bytes of one padded token of a batch (assumed)
_HEAD, _ACTOR = 2 * _GIB, 8 * 2**20  # Ray's head, and what it keeps of one rank (assumed)
_NCCL, _BATCH_TOKEN = 1 * _GIB, 40  # /dev/shm: of one rank, and of one padded token of a batch (assumed)
_EXPORTER, _TENSOR_COPIES = 3 * _GIB // 2, 4  # the process, and copies of a tensor in it (assumed)
_LARGEST_TENSOR = 2 * _GIB  # of a model that only the pods can read
_CHOICES = 512  # routed experts of a token of a model that only the pods can read
_BF16 = 2


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes of one container each.

    ``trainer``: the ranks of a training pod, of which ``moved`` is what is offloaded, ``saving`` a checkpoint
    that is written, ``exporting`` the weights of an export that is written beside steps, and its files that
    are uploaded, ``copies`` the memory tier's snapshots of its own ranks, ``staged`` weight versions.
    ``trainer_agent``: that pod's agent, with the snapshots of other ranks. ``engine``: an engine's server in
    one pod, of which ``experts`` are a step's routed experts. ``agent``: a rollout agent, with a whole
    version if it is to apply deltas or read over NIXL. ``shared``: /dev/shm of a training pod, of which
    ``batch`` is a step's batch.
    """

    trainer: int
    moved: int
    saving: int
    exporting: int
    copies: int
    staged: int
    trainer_agent: int
    engine: int
    experts: int
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
    parameters_of_rank = max(agent_memory.local_parameters(stage, spec) for stage in stages)
    moved = ranks * max(stage.host for stage in stages)
    rounded = ranks * (PINNED - 1) * max(stage.copied for stage in stages)
    saving = ranks * max(stage.saved + stage.chunks for stage in stages)
    exporting = ranks * _BF16 * parameters_of_rank if spec.checkpoint.export_every_steps else 0
    if spec.checkpoint.store.uri and (spec.checkpoint.export_every_steps or spec.checkpoint.export_at_end):
        exporting += ranks * EXPORT_FILE_BYTES  # a file is encoded in memory before it is uploaded
    tier = spec.checkpoint.memory
    snapshots = agent_memory.snapshots_of_pod(spec, stages)
    copies = agent_memory.written_by_ranks(snapshots)
    version = parameters.model_bytes(model, fp8, spec.model.multi_token_prediction)
    staged = 2 * version // trainer.nodes  # the version that engines read, and the next one
    tokens = batch_tokens(spec)
    experts = routed_experts(spec, pool, model) if engine.return_routed_experts else 0
    return HostMemory(
        trainer=ranks * PROCESS + moved + rounded + saving + exporting + copies + staged,
        moved=moved,
        saving=saving,
        exporting=exporting,
        copies=copies,
        staged=staged,
        trainer_agent=agent_memory.trainer_agent(snapshots, tier.replicas if tier else 0, trainer.nodes),
        engine=engine.gpus_per_node * PROCESS + experts,
        experts=experts,
        agent=agent_memory.rollout_agent(
            job_weight_path(spec, pool), engine, model, spec.model.multi_token_prediction
        ),
        controller=controller_memory(tokens),
        head=head_memory(trainer.world),
        shared=ranks * _NCCL + _BATCH_TOKEN * tokens,
        batch=_BATCH_TOKEN * tokens,
    )


def routed_experts(spec: GRPOJobSpec, pool: RolloutTemplate, model: ModelShape | None) -> int:
    """Return the bytes of a step's routed experts at one of the engines, one for each choice."""
    choices = _CHOICES
    if model is not None:
        top = model.experts.top_k if model.experts else 0
        choices = (model.layers - model.dense_layers) * top
    return int(batch_tokens(spec) * (1 + spec.rollout.over_sample_rate) * choices / pool.replicas)


def batch_tokens(spec: GRPOJobSpec) -> int:
    """Return the padded tokens of a step."""
    return spec.data.train_batch_size * spec.algorithm.samples_per_prompt * spec.data.total_length


def controller_memory(tokens: int) -> int:
    """Return the bytes of the controller in a job of ``tokens`` padded tokens a step."""
    return _CONTROLLER + _TOKEN * tokens


def export_memory(model: ModelShape | None) -> int:
    """Return the bytes of a process that exports a checkpoint, tensor by tensor.

    It holds a file that is full and one in its encoded form, and copies of the largest tensor. ``model``:
    None if only the pods can read it.
    """
    if model is None:
        return _EXPORTER + 2 * EXPORT_FILE_BYTES + _TENSOR_COPIES * _LARGEST_TENSOR
    files = 2 * min(EXPORT_FILE_BYTES, parameters.model_bytes(model))
    return _EXPORTER + files + _TENSOR_COPIES * _BF16 * parameters.embedding(model).split


def head_memory(ranks: int) -> int:
    """Return the bytes of Ray's head in a job of ``ranks`` ranks."""
    return _HEAD + _ACTOR * ranks


def shortages(spec: GRPOJobSpec, pool: RolloutTemplate, need: HostMemory, given: dict[str, int]) -> list[str]:
    """Return why given memory is too small. ``given``: bytes by field; absent fields are not checked.

    Only what is computed refuses a job: sizes of processes are assumed.
    """
    state = need.moved + need.saving + need.exporting + need.copies + need.staged
    experts = need.experts
    if pool.engine.routed_experts_gibibytes is not None:  # the volume's size
        experts = min(experts, pool.engine.routed_experts_gibibytes * _GIB)
    shm = need.batch, need.shared
    wanted = {field: shm for field in given if field.startswith("spec.trainer.podTemplate.")}
    wanted |= {
        # What is in /dev/shm counts as memory of the container that wrote it.
        "spec.trainer.resources.memory": (state + need.batch, need.trainer + need.shared),
        "spec.trainer.agentResources.memory": (need.trainer_agent - AGENT_MEMORY, need.trainer_agent),
        "spec.rollout.template.resources.memory": (experts, need.engine - need.experts + experts),
        "spec.rollout.template.agentResources.memory": (need.agent - AGENT_MEMORY, need.agent),
        "spec.controller.resources.memory": (need.controller - _CONTROLLER, need.controller),
        "spec.scheduling.sharedMemory": shm,
    }
    if pool.engine.device is not Device.CUDA or spec.trainer.device is not Device.CUDA:
        return []
    return [
        _shortage(field, given[field], least, planned) + ", or see the parts with grpo-plan"
        for field, (least, planned) in wanted.items()
        if field in given and given[field] < least
    ]


def pool_shortage(spec: RolloutPoolSpec, model: ModelShape) -> str:
    """Return why the agents of a RolloutPool without a job have too little memory, or ""."""
    given = spec.agent_resources.memory
    path, mtp = pool_weight_path(spec), spec.model.multi_token_prediction
    planned = agent_memory.rollout_agent(path, spec.engine, model, mtp)
    if given is None or quantity(given) >= planned - AGENT_MEMORY:
        return ""
    field, size = "spec.agentResources.memory", int(quantity(given))
    return _shortage(field, size, planned - AGENT_MEMORY, planned)


def _shortage(field: str, given: int, least: int, planned: int) -> str:
    return f"{field}={_gib(given)}: data alone take {_gib(least)}: set it to {_gib(planned)}"


def _gib(size: int) -> str:
    return f"{-(-size // _GIB)}Gi"
