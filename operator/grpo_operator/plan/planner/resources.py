"""Resources of a job's containers where its spec sets none (pure).

Requests of CPU are a guarantee, not a limit. Memory is requested and limited alike, so it has a margin.
"""

import math

from grpo_operator.api.base import AGENT_RESOURCES, Device, Resources
from grpo_operator.api.catalog.gpus import GPUS
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.model import ModelSpec
from grpo_operator.api.v1alpha1.rolloutpool import EngineSpec, RolloutPoolSpec, RolloutTemplate
from grpo_operator.api.v1alpha1.status import PlannedResources
from grpo_operator.api.weight_path import WeightPath
from grpo_operator.plan.planner import agent_memory
from grpo_operator.plan.planner.engines.memory import kv_bytes_per_token
from grpo_operator.plan.planner.engines.shape import EngineShape
from grpo_operator.plan.planner.host_memory import (
    PROCESS,
    HostMemory,
    batch_tokens,
    controller_memory,
    routed_experts,
)
from grpo_operator.plan.planner.model import parameters
from grpo_operator.plan.planner.model.shape import ModelShape
from grpo_operator.plan.planner.training.memory import StageMemory
from grpo_operator.plan.weight_path import job_weight_path, pool_weight_path

_GIB = 2**30
_MARGIN = 1.25  # of memory for processes, whose sizes are assumed
# Cores of a pod for each of its GPUs. Trainers and engines that share GPUs share the node's cores too.
_CORES, _SHARED_CORES = 6, 3
_CONTROLLER_CORES = 2  # of a job with GPUs, and another for each _SAMPLES_PER_CORE responses
_SAMPLES_PER_CORE = 1024  # responses of a step that one core decodes and scores
_CPU_CORES = 0.25  # of a process that computes on CPUs; small, so that small jobs fit on small nodes
_CPU_PROCESS = 1.5 * _GIB
_UNKNOWN = 3 * _GIB  # of a process that computes on CPUs with a model that only the pods can read
_LOADED = 3  # copies of the weights while an engine on CPUs loads a version
# Ray puts up to 10 GB of objects on disk where /dev/shm is smaller than them.
_SHARED_FLOOR = 16
_ROUNDED = 8 * _GIB  # sizes from here on are whole GiB
_POOL_EXPERTS = {Device.CUDA: 4, Device.CPU: 1}  # GiB of routed experts of jobs that are not known yet


def job_resources(
    spec: GRPOJobSpec,
    pool: RolloutTemplate,
    model: ModelShape | None,
    stages: tuple[StageMemory, ...],
    host: HostMemory | None,
) -> PlannedResources:
    """Return the resources of a job that generates with the engines of ``pool``.

    ``stages``: empty without ``model``. ``host``: None without a model or without GPUs.
    """
    tokens = batch_tokens(spec)
    shared = max(math.ceil(_MARGIN * host.shared / _GIB) if host else _SHARED_FLOOR, _SHARED_FLOOR)
    experts = min(max(math.ceil(_MARGIN * routed_experts(spec, pool, model) / _GIB), 1), 2048)
    trainer, tier = spec.trainer, spec.checkpoint.memory
    snapshots = agent_memory.snapshots_of_pod(spec, stages)
    copies = agent_memory.written_by_ranks(snapshots)
    if trainer.device is Device.CPU:
        cpu, memory = trainer.gpus_per_node * _CPU_CORES, trainer.gpus_per_node * _cpu_rank(stages) + copies
        controller = Resources(cpu="100m", memory=_gib(controller_memory(tokens) // 2))
    else:
        cpu = trainer.gpus_per_node * (_SHARED_CORES if spec.shares_gpus else _CORES)
        processes = trainer.gpus_per_node * PROCESS
        # Of an unknown model: what could be offloaded, and the copies of the memory tier.
        offloaded = trainer.gpus_per_node * GPUS[trainer.gpu_type].memory
        state = host.trainer - processes if host else offloaded + copies
        memory = _MARGIN * processes + state + shared * _GIB
        samples = spec.data.train_batch_size * spec.algorithm.samples_per_prompt
        cores = _CONTROLLER_CORES + math.ceil(samples / _SAMPLES_PER_CORE)
        controller = Resources(cpu=_cores(cores), memory=_gib(_MARGIN * controller_memory(tokens)))
    return PlannedResources(
        controller=controller,
        trainer=Resources(cpu=_cores(cpu), memory=_gib(memory)),
        trainer_agent=_agent(
            agent_memory.trainer_agent(snapshots, tier.replicas if tier else 0, trainer.nodes)
        ),
        engine=_engine(pool.engine, model, spec.shares_gpus, experts),
        rollout_agent=_rollout_agent(pool, job_weight_path(spec, pool), model, spec.model),
        shared_memory=f"{shared}Gi",
        routed_experts_gibibytes=experts,
    )


def completed_job(spec: GRPOJobSpec, planned: PlannedResources) -> GRPOJobSpec:
    """Return the spec with the planned resources where it sets none; ``rollout`` stays as it is."""
    controller = spec.controller.model_copy(
        update={"resources": spec.controller.resources.or_else(planned.controller)}
    )
    trainer = spec.trainer.model_copy(
        update={
            "resources": spec.trainer.resources.or_else(planned.trainer),
            "agent_resources": spec.trainer.agent_resources.or_else(planned.trainer_agent),
        }
    )
    shared = spec.scheduling.shared_memory or planned.shared_memory
    scheduling = spec.scheduling.model_copy(update={"shared_memory": shared})
    return spec.model_copy(update={"controller": controller, "trainer": trainer, "scheduling": scheduling})


def completed_template(pool: RolloutTemplate, planned: PlannedResources) -> RolloutTemplate:
    """Return a job's own pool with the planned resources where it sets none."""
    experts = pool.engine.routed_experts_gibibytes or planned.routed_experts_gibibytes
    engine = pool.engine.model_copy(update={"routed_experts_gibibytes": experts})
    return pool.model_copy(
        update={
            "engine": engine,
            "resources": pool.resources.or_else(planned.engine),
            "agent_resources": pool.agent_resources.or_else(planned.rollout_agent),
        }
    )


def completed_pool(spec: RolloutPoolSpec) -> RolloutPoolSpec:
    """Return a RolloutPool without a job, with resources where its spec sets none."""
    config = spec.model.config()
    model = ModelShape.from_hf(config) if config else None
    experts = spec.engine.routed_experts_gibibytes or _POOL_EXPERTS[spec.engine.device]
    resources = spec.resources.or_else(_engine(spec.engine, model, False, experts))
    agent = spec.agent_resources.or_else(_rollout_agent(spec, pool_weight_path(spec), model, spec.model))
    engine = spec.engine.model_copy(update={"routed_experts_gibibytes": experts})
    shared = spec.scheduling.shared_memory or f"{_SHARED_FLOOR}Gi"
    scheduling = spec.scheduling.model_copy(update={"shared_memory": shared})
    return spec.model_copy(
        update={
            "resources": resources,
            "agent_resources": agent,
            "engine": engine,
            "scheduling": scheduling,
        }
    )


def _rollout_agent(
    pool: RolloutTemplate, path: WeightPath, model: ModelShape | None, spec: ModelSpec
) -> Resources:
    return _agent(agent_memory.rollout_agent(path, pool.engine, model, spec.multi_token_prediction))


def _agent(memory: int) -> Resources:
    return Resources(cpu=AGENT_RESOURCES.cpu, memory=_gib(memory))


def _engine(engine: EngineSpec, model: ModelShape | None, shares_gpus: bool, experts: int) -> Resources:
    """Return the resources of an engine's server in one pod. ``experts``: GiB for routed experts."""
    kept = experts * _GIB if engine.return_routed_experts else 0
    if engine.device is Device.CUDA:
        cpu = engine.gpus_per_node * (_SHARED_CORES if shares_gpus else _CORES)
        memory = engine.gpus_per_node * _MARGIN * PROCESS + _SHARED_FLOOR * _GIB
        return Resources(cpu=_cores(cpu), memory=_gib(memory + kept))
    ranks = -(-engine.tensor_parallel // engine.nodes_per_engine)
    each = max(_CPU_PROCESS + _cpu_state(engine, model), 3 * _GIB) if model else _UNKNOWN
    return Resources(cpu=_cores(ranks * _CPU_CORES), memory=_gib(ranks * each + kept))


def _cpu_state(engine: EngineSpec, model: ModelShape | None) -> float:
    """Return the bytes of weights and KV cache in one process of an engine on CPUs."""
    if model is None:
        return 0.0
    weights = 2 * parameters.model_bytes(model) / engine.tensor_parallel  # in fp32
    tokens = engine.max_total_tokens or engine.context_length * engine.max_running_requests
    return _LOADED * weights + 2 * tokens * kv_bytes_per_token(model, EngineShape(1))


def _cpu_rank(stages: tuple[StageMemory, ...]) -> float:
    """Return the bytes of a rank on CPUs: what a GPU would hold, and a checkpoint that is gathered."""
    if not stages:
        return _UNKNOWN
    state = max(stage.total + stage.host + 2 * stage.optimizer_shard for stage in stages)
    return max(_CPU_PROCESS + state, 2 * _GIB)


def _gib(size: float) -> str:
    mebibytes = math.ceil(size / 2**20)
    if size < _ROUNDED and mebibytes % 1024:
        return f"{mebibytes}Mi"
    return f"{math.ceil(size / _GIB)}Gi"


def _cores(number: float) -> str:
    return f"{number:g}" if float(number).is_integer() else f"{round(1000 * number)}m"
