"""Resolves a job's spec into a plan, which holds layout and memory, or refuses the job (pure)."""

from dataclasses import dataclass, replace

from grpo_operator.api.base import Device, Resources
from grpo_operator.api.catalog.gpus import GPUS, RESERVED
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.api.v1alpha1.moe import TokenDispatcher
from grpo_operator.api.v1alpha1.rolloutpool import EngineSpec, RolloutTemplate
from grpo_operator.api.v1alpha1.status import LayoutStatus, PlannedDeadlines, PlannedResources
from grpo_operator.api.v1alpha1.trainer import ParallelismSpec
from grpo_operator.api.weight_path import WeightPath
from grpo_operator.plan.capacity.feasibility import quantity
from grpo_operator.plan.planner.deadlines import (
    LongestUnits,
    completed_deadlines,
    deadline_problems,
    longest_units,
    planned_deadlines,
)
from grpo_operator.plan.planner.engines import shape as engine_rules
from grpo_operator.plan.planner.engines.memory import EngineMemory, engine_memory
from grpo_operator.plan.planner.engines.room import gigabytes, room_problem, shared_problem
from grpo_operator.plan.planner.engines.shape import EngineShape
from grpo_operator.plan.planner.host_memory import HostMemory, host_memory, shortages
from grpo_operator.plan.planner.log_probs import log_prob_problem, lower_log_probs
from grpo_operator.plan.planner.model.shape import ModelShape
from grpo_operator.plan.planner.resources import completed_job, completed_template, job_resources
from grpo_operator.plan.planner.shared_memory import overlaid_sizes
from grpo_operator.plan.planner.training.memory import BF16, FP32, StageMemory
from grpo_operator.plan.planner.training.search import TrainingPool, feasible, nearest, worst
from grpo_operator.plan.weight_path import (
    job_weight_path,
    job_weight_path_problem,
)

_LAYOUT, _ENGINE = "spec.trainer.parallelism", "spec.rollout.template.engine"
# Defaults of jobs that were accepted before resources were planned: their pods must not change.
_BEFORE = PlannedResources(
    controller=Resources(cpu="1", memory="2Gi"),
    trainer=Resources(cpu="1", memory="4Gi"),
    engine=Resources(cpu="1", memory="4Gi"),
    shared_memory="64Gi",
    routed_experts_gibibytes=4,
)


class RefusedError(ValueError):
    """A spec that cannot run. The message names field, value and remedy; ``reason`` is for conditions."""

    def __init__(self, message: str, reason: str = "InvalidSpec") -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class JobPlan:
    """Layout and memory of a job, and the path of its weights into the engines.

    ``stages`` is empty when the operator does not know the model; ``engine_memory`` and ``host`` are None
    then, and also without GPUs. ``reason``: why this layout was chosen. ``resources``: of containers for
    which the spec sets none. ``units``: the longest ones between two signs of progress, beside which
    ``deadlines`` are long; None without GPUs.
    """

    layout: Layout
    model: ModelShape | None
    training: TrainingPool | None
    stages: tuple[StageMemory, ...]
    engine: EngineShape
    engine_memory: EngineMemory | None
    reason: str
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
    if config is None:
        if sizes.auto:
            raise RefusedError(
                f"{_LAYOUT}.auto: the operator cannot read {spec.model.path}: set spec.model.architecture, "
                "or set the parallel sizes explicitly"
            )
        layout = sizes.layout(spec.trainer.world)
        reason = "given; the operator does not know the model"
        resources = job_resources(spec, pool, None, (), None)
        deadlines = planned_deadlines(None)
        return JobPlan(layout, None, None, (), engine, None, reason, path, resources, deadlines)
    model = ModelShape.from_hf(config)
    if unsuited := spec.trainer.moe.problem(model.model_type):
        raise RefusedError(unsuited)
    training = training_pool(spec, pool, model)
    if spec.shares_gpus and (problem := shared_problem(pool.engine, _ENGINE)):
        raise RefusedError(problem, "Infeasible")
    layout, reason = _choose(spec, training)
    stages = training.memory(layout)
    if spec.trainer.device == Device.CUDA:
        _check_memory(training, layout, stages, spec)
    memory = checked_engine(model, engine, pool.engine, _ENGINE)
    host = _host(spec, pool, model, stages, engine) if memory is not None else None
    resources = job_resources(spec, pool, model, stages, host)
    units = _units(spec, pool, training, layout)
    return JobPlan(
        layout, model, training, stages, engine, memory, reason, path, resources, planned_deadlines(units),
        host, units,
    )  # fmt: skip


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


def with_layout(spec: GRPOJobSpec, layout: LayoutStatus) -> GRPOJobSpec:
    """Return the spec with explicit sizes in place of ``auto``, as the ranks read it.

    It gets the resources and deadlines that were planned when the job was accepted.
    """
    sizes = {name: getattr(layout, name) for name in ParallelismSpec.model_fields if name != "auto"}
    trainer = spec.trainer.model_copy(update={"parallelism": ParallelismSpec(**sizes)})
    completed = completed_deadlines(
        spec.model_copy(update={"trainer": trainer}), layout.deadlines or planned_deadlines(None)
    )
    return completed_job(completed, layout.resources or _BEFORE)


def with_resources(pool: RolloutTemplate, layout: LayoutStatus) -> RolloutTemplate:
    """Return the job's own pool with the resources that were planned when the job was accepted."""
    return completed_template(pool, layout.resources or _BEFORE)


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


def training_pool(spec: GRPOJobSpec, pool: RolloutTemplate, model: ModelShape) -> TrainingPool:
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
        recompute=trainer.recompute == "full",
        fp8_sync=pool.engine.quantization != "none",
        sync_buffers=2 * spec.weight_sync.bucket_megabytes * 2**20 * (trainer.device == Device.CUDA),
        frozen=spec.algorithm.needs_reference + bool(spec.reward and spec.reward.model),
        critic=spec.algorithm.critic is not None,
        precision=BF16 if trainer.device == Device.CUDA else FP32,
        offload=trainer.offload,
        mtp=spec.model.multi_token_prediction,
    )


def _choose(spec: GRPOJobSpec, training: TrainingPool) -> tuple[Layout, str]:
    sizes = spec.trainer.parallelism
    if not sizes.auto:
        layout = sizes.layout(spec.trainer.world)
        problems = training.problems(layout)
        if problems:
            raise RefusedError("; ".join(f"spec.trainer.{problem}" for problem in problems))
        return layout, "given"
    options = feasible(training)
    if not options:
        raise RefusedError(
            f"{_LAYOUT}.auto: no layout of {training.world} GPUs fits {gigabytes(training.gpu.usable)}: "
            f"{lower_log_probs(training)}add nodes, shorten data.promptLength + data.responseLength, "
            "or use GPUs with more memory",
            "Infeasible",
        )
    if spec.trainer.moe.dispatcher is TokenDispatcher.DEEPEP and options[0].expert == 1:
        raise RefusedError(
            f"spec.trainer.moe.dispatcher=deepep needs expert parallelism, and auto chose {options[0]}: set "
            f"{_LAYOUT}.expert and the other sizes, or dispatcher to auto or alltoall"
        )
    return options[0], explain(training, options)


def explain(training: TrainingPool, options: list[Layout]) -> str:
    """Return why the first of the feasible layouts is chosen."""
    best, cost = options[0], training.cost(options[0])
    text = (
        f"{best}: fastest by estimate of {len(options)} layouts that fit; "
        f"{cost.total:.1f} s for an optimizer step over {training.sequences} sequences of the full length of "
        f"{training.sequence} tokens, of which {cost.compute:.1f} s are computation; "
        f"the largest other cost is {cost.largest}"
    )
    if len(options) > 1:
        other = options[1]
        text += f"; next is {other} with {training.cost(other).total:.1f} s"
    return text


def _check_memory(
    training: TrainingPool, layout: Layout, stages: tuple[StageMemory, ...], spec: GRPOJobSpec
) -> None:
    full = worst(stages)
    if full.total <= training.gpu.usable:
        return
    if problem := log_prob_problem(training, layout):
        raise RefusedError(problem, "Infeasible")
    other = nearest(training, layout)
    remedy = (
        f"try {other} ({gigabytes(worst(training.memory(other)).total)})"
        if other
        else "no layout of this pool fits: add nodes or shorten the sequences"
    )
    raise RefusedError(
        f"{_LAYOUT}: {layout} on {layout.world} needs {gigabytes(full.state)} before activations and "
        f"{gigabytes(full.total)} in total on each GPU of stage {full.stage + 1}, but "
        f"{gigabytes(training.gpu.usable)} are usable on {spec.trainer.gpu_type}: {remedy}",
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
