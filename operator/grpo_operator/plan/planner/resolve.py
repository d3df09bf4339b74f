"""Resolves a job's spec into a plan, which holds layout and memory, or refuses the job (pure)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from grpo_operator.api.base import Device
from grpo_operator.api.catalog.gpus import GPUS, RESERVED
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.api.v1alpha1.moe import TokenDispatcher
from grpo_operator.api.v1alpha1.offload import OffloadSpec
from grpo_operator.api.v1alpha1.recompute import Recompute
from grpo_operator.api.v1alpha1.rolloutpool import EngineSpec, RolloutTemplate
from grpo_operator.api.v1alpha1.status import PlannedDeadlines, PlannedResources
from grpo_operator.api.v1alpha1.trainer import KernelChoice
from grpo_operator.api.weight_path import Backend, WeightPath
from grpo_operator.plan.capacity.feasibility import quantity
from grpo_operator.plan.planner.deadlines import (
    LongestUnits,
    deadline_problems,
    longest_units,
    planned_deadlines,
)
from grpo_operator.plan.planner.efficiency import of_trainer
from grpo_operator.plan.planner.engines import shape as engine_rules
from grpo_operator.plan.planner.engines.memory import EngineMemory, engine_memory
from grpo_operator.plan.planner.engines.room import gigabytes, room_problem, shared_problem
from grpo_operator.plan.planner.engines.shape import EngineShape
from grpo_operator.plan.planner.host_memory import HostMemory, host_memory, shortages
from grpo_operator.plan.planner.log_probs import log_prob_problem
from grpo_operator.plan.planner.model.shape import ModelShape
from grpo_operator.plan.planner.resources import job_resources
from grpo_operator.plan.planner.shared_memory import overlaid_sizes
from grpo_operator.plan.planner.training.memory import FP32, StageMemory, of_precision
from grpo_operator.plan.planner.training.offload import Option, offload_levels
from grpo_operator.plan.planner.training.reasons import beside_layout, fastest, no_layout, of_room, remedy
from grpo_operator.plan.planner.training.recompute import recompute_options
from grpo_operator.plan.planner.training.search import (
    LOCAL_MARGIN,
    MARGIN,
    Choice,
    TrainingPool,
    choices,
    chosen,
    fits,
    worst,
)
from grpo_operator.plan.weight_path import (
    job_weight_path,
    job_weight_path_problem,
)

_LAYOUT, _ENGINE = "spec.trainer.parallelism", "spec.rollout.template.engine"


class RefusedError(ValueError):
    """A spec that cannot run. The message names field, value and remedy; ``reason`` is for conditions."""

    def __init__(self, message: str, reason: str = "InvalidSpec") -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class JobPlan:
    """Layout and memory of a job, and the path of its weights into the engines.

    ``stages`` is empty when the operator does not know the model; ``engine_memory`` and ``host`` are None
    then, and also without GPUs. ``reason``: why this layout was chosen. ``recompute``: what the ranks
    recompute. ``offload``: what waits in host memory. ``resources``: of containers for which the spec sets
    none. ``units``: the longest ones between two signs of progress, beside which ``deadlines`` are long; None
    without GPUs.
    """

    layout: Layout
    model: ModelShape | None
    training: TrainingPool | None
    stages: tuple[StageMemory, ...]
    engine: EngineShape
    engine_memory: EngineMemory | None
    reason: str
    recompute: Recompute
    offload: OffloadSpec
    weight_path: WeightPath
    resources: PlannedResources
    deadlines: PlannedDeadlines
    host: HostMemory | None = None
    units: LongestUnits | None = None


def resolve(spec: GRPOJobSpec, pool: RolloutTemplate) -> JobPlan:
    """Plan a job that generates with the engines of ``pool``, its own or a shared one.

    Raises RefusedError.
    """
    problem = job_weight_path_problem(spec, pool)
    if problem:
        raise RefusedError(problem)
    path = job_weight_path(spec, pool)
    config = spec.model.config()
    sizes = spec.trainer.parallelism
    engine = engine_shape(pool.engine)
    model = None if config is None else ModelShape.from_hf(config)
    levels = _levels(spec, model)
    if model is None:
        if sizes.auto:
            raise RefusedError(
                f"{_LAYOUT}.auto: the operator cannot read {spec.model.path}: set spec.model.architecture, "
                "or set the parallel sizes explicitly"
            )
        layout = sizes.layout(spec.trainer.world)
        reason = "given; the operator does not know the model"
        resources = job_resources(spec, pool, None, (), None)
        deadlines = planned_deadlines(None)
        return JobPlan(
            layout, None, None, (), engine, None, reason, *levels[0][0], path, resources, deadlines
        )  # fmt: skip
    if unsuited := spec.trainer.moe.problem(model.model_type):
        raise RefusedError(unsuited)
    if spec.shares_gpus and (problem := shared_problem(pool.engine, _ENGINE)):
        raise RefusedError(problem, "Infeasible")
    choice, reason = _choose(
        spec, [[training_pool(spec, pool, model, *option) for option in level] for level in levels]
    )
    training, layout = choice.pool, choice.layout
    stages = training.memory(layout)
    if spec.trainer.device == Device.CUDA:
        _check_memory(training, layout, stages, spec)
    memory = checked_engine(model, engine, pool.engine, _ENGINE)
    host = _host(spec, pool, model, stages, engine) if memory is not None else None
    resources = job_resources(spec, pool, model, stages, host)
    units = _units(spec, pool, training, layout)
    return JobPlan(
        layout, model, training, stages, engine, memory, reason, training.recompute, training.offload, path,
        resources, planned_deadlines(units), host, units,
    )  # fmt: skip


def _levels(spec: GRPOJobSpec, model: ModelShape | None) -> tuple[tuple[Option, ...], ...]:
    try:
        return offload_levels(spec.trainer, model, recompute_options(spec.trainer, model))
    except ValueError as error:
        raise RefusedError(str(error)) from error


def _units(
    spec: GRPOJobSpec, pool: RolloutTemplate, training: TrainingPool, layout: Layout
) -> LongestUnits | None:
    """Return the longest units of work between two signs of progress. Raises RefusedError."""
    if spec.trainer.device is not Device.CUDA:
        return None
    units = longest_units(spec, pool, training, layout)
    if problems := deadline_problems(spec, units):
        raise RefusedError("; ".join(problems))
    return units


def _host(
    spec: GRPOJobSpec,
    pool: RolloutTemplate,
    model: ModelShape,
    stages: tuple[StageMemory, ...],
    engine: EngineShape,
) -> HostMemory | None:
    """Return the host memory of the job's containers. Raises RefusedError when the spec gives less."""
    if spec.trainer.device is not Device.CUDA:
        return None
    need = host_memory(spec, pool, model, stages, engine.fp8)
    fields = {
        "spec.trainer.resources.memory": spec.trainer.resources.memory,
        "spec.trainer.agentResources.memory": spec.trainer.agent_resources.memory,
        "spec.controller.resources.memory": spec.controller.resources.memory,
        "spec.scheduling.sharedMemory": spec.scheduling.shared_memory,
        **overlaid_sizes(spec.trainer.pod_template),
    }
    if spec.rollout.template is not None:  # a shared pool has been checked without this job
        fields["spec.rollout.template.resources.memory"] = pool.resources.memory
        fields["spec.rollout.template.agentResources.memory"] = pool.agent_resources.memory
    given = {field: int(quantity(size)) for field, size in fields.items() if size is not None}
    problems = shortages(spec, pool, need, given)
    if problems:
        raise RefusedError("; ".join(problems), "Infeasible")
    return need


def engine_shape(engine: EngineSpec) -> EngineShape:
    """Return the sizes that the planner needs of an engine."""
    return EngineShape(
        engine.tensor_parallel,
        engine.expert_parallel,
        engine.attention_data_parallel,
        fp8=engine.quantization != "none",
        all_to_all=engine.moe_a2a_backend != "none",
        dp_lm_head=engine.dp_lm_head,
        drafts=engine.speculative == "mtp",
    )


def training_pool(
    spec: GRPOJobSpec,
    pool: RolloutTemplate,
    model: ModelShape,
    recompute: Recompute,
    offload: OffloadSpec,
) -> TrainingPool:
    """Return the planner's input for the training pool. A CPU pool is planned as if it had GPUs."""
    trainer = spec.trainer
    gpu = GPUS[trainer.gpu_type]
    if spec.shares_gpus:  # a sleeping engine still holds some memory
        gpu = replace(gpu, memory=gpu.memory - RESERVED)
    return TrainingPool(
        model=model,
        gpu=gpu,
        world=trainer.world,
        gpus_per_node=trainer.gpus_per_node,
        sequences=trainer.mini_batch_size * spec.algorithm.samples_per_prompt,
        sequence=spec.data.prompt_length + spec.data.response_length,
        micro_batch=trainer.micro_batch_size_per_gpu,
        max_tokens=trainer.max_tokens_per_gpu,
        log_prob_micro_batch=trainer.log_prob_micro_batch_size_per_gpu,
        log_prob_max_tokens=trainer.log_prob_max_tokens_per_gpu,
        recompute=recompute,
        fp8_sync=pool.engine.quantization != "none",
        sync_buffers=2 * spec.weight_sync.bucket_megabytes * 2**20 * (trainer.device == Device.CUDA),
        frozen=spec.algorithm.needs_reference + bool(spec.reward and spec.reward.model),
        critic=spec.algorithm.critic is not None,
        precision=of_precision(trainer.precision, trainer.precision_aware_optimizer)
        if trainer.device == Device.CUDA
        else FP32,
        efficiency=of_trainer(trainer),
        fused=trainer.device == Device.CUDA and trainer.kernels is not KernelChoice.LOCAL,
        offload=offload,
        margin=LOCAL_MARGIN if trainer.kernels is KernelChoice.LOCAL else MARGIN,
        mtp=spec.model.multi_token_prediction,
        moe=trainer.moe,
        links=_links(spec, pool),
    )


def _links(spec: GRPOJobSpec, pool: RolloutTemplate) -> int | None:
    """Return the number of engines to which each rank has a link over NCCL; None for ranks on CPUs."""
    if spec.trainer.device is not Device.CUDA:
        return None
    return pool.replicas * (job_weight_path(spec, pool).direct is Backend.NCCL)


def _choose(spec: GRPOJobSpec, levels: Sequence[Sequence[TrainingPool]]) -> tuple[Choice, str]:
    """Return layout and pool, and the reason.

    The pools of a level differ in what they recompute and offload. A level counts where nothing fits in those
    before it.
    """
    sizes, offload, first = spec.trainer.parallelism, spec.trainer.offload, levels[0][0]
    if not sizes.auto:
        layout = sizes.layout(spec.trainer.world)
        problems = first.problems(layout)
        if problems:
            raise RefusedError("; ".join(f"spec.trainer.{problem}" for problem in problems))
        tried = [(pools, chosen(pools, layout)) for pools in levels]
        pools, choice = next((each for each in tried if fits(each[1].pool, layout)), tried[-1])
        return choice, f"given{beside_layout(choice, pools, offload)}{of_room(choice)}"
    found = ((pools, choices(pools)) for pools in levels)
    pools, options = next((each for each in found if each[1]), (levels[-1], []))
    if not options:
        raise RefusedError(f"{_LAYOUT}.auto: {no_layout(pools, offload.auto)}", "Infeasible")
    best = options[0]
    if spec.trainer.moe.dispatcher is TokenDispatcher.DEEPEP and best.layout.expert == 1:
        raise RefusedError(
            f"spec.trainer.moe.dispatcher=deepep needs expert parallelism, and auto chose {best.layout}: set "
            f"{_LAYOUT}.expert and the other sizes, or dispatcher to auto or alltoall"
        )
    return best, f"{fastest(options)}{beside_layout(best, pools, offload)}"


def _check_memory(
    training: TrainingPool, layout: Layout, stages: tuple[StageMemory, ...], spec: GRPOJobSpec
) -> None:
    full = worst(stages)
    if full.total <= training.gpu.usable:
        return
    if problem := log_prob_problem(training, layout):
        raise RefusedError(problem, "Infeasible")
    raise RefusedError(
        f"{_LAYOUT}: {layout} on {layout.world} needs {gigabytes(full.state)} before activations and "
        f"{gigabytes(full.total)} in total on each GPU of stage {full.stage + 1}, but "
        f"{gigabytes(training.gpu.usable)} are usable on {spec.trainer.gpu_type}: "
        f"{remedy(training, layout)}",
        "Infeasible",
    )


def checked_engine(
    model: ModelShape, shape: EngineShape, spec: EngineSpec, field: str
) -> EngineMemory | None:
    """Return the memory of an engine, whose spec is in ``field``; None on CPUs. Raises RefusedError."""
    problems = engine_rules.problems(model, shape)
    if problems:
        raise RefusedError("; ".join(f"{field}.{problem}" for problem in problems))
    if spec.device == Device.CPU:
        return None
    gpu = GPUS[spec.gpu_type]
    memory = engine_memory(
        model,
        shape,
        memory=gpu.memory,
        fraction=spec.memory_fraction,
        context=spec.context_length,
        requests=spec.max_running_requests,
    )
    if problem := room_problem(spec, shape, memory, field):
        raise RefusedError(problem, "Infeasible")
    return memory
