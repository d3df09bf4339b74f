"""The step model of a job: its spec and plan, with what must be assumed about it (pure)."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from grpo_operator.api.base import Device
from grpo_operator.api.catalog.gpus import GPUS
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.rolloutpool import RolloutTemplate
from grpo_operator.plan.planner.efficiency import HOST_RATE, of_trainer
from grpo_operator.plan.planner.model.parameters import hf_tensors
from grpo_operator.plan.planner.resolve import JobPlan
from grpo_operator.plan.planner.step.cost import RolloutHardware, StepModel, TrainingHardware, Transfer
from grpo_operator.plan.planner.step.lengths import ResponseLengths
from grpo_operator.plan.planner.step.workload import StepWorkload
from grpo_operator.plan.planner.transfer_bounds import sync_bound

_MEAN_SHARE = 0.3  # of responseLength and promptLength


@dataclass(frozen=True, slots=True)
class Assumptions:
    """Assumptions about a job that its spec leaves open.

    ``mean_prompt``, ``mean_response``: tokens; None: 30 % of the longest.
    ``sigma``: standard deviation of the logarithm of a response's length. ``shares``: efficiencies by name,
    instead of those of the trainer's kernels.
    """

    mean_prompt: float | None = None
    mean_response: float | None = None
    sigma: float = 0.8
    shares: Mapping[str, Any] = field(default_factory=dict)


def step_model(
    spec: GRPOJobSpec, pool: RolloutTemplate, plan: JobPlan, assumed: Assumptions | None = None
) -> StepModel | None:
    """Return the step model of a planned job; None without a known model or without GPUs.

    Raises ValueError for assumptions that cannot be.
    """
    if plan.model is None or plan.engine_memory is None or spec.trainer.device is not Device.CUDA:
        return None
    assumed = assumed or Assumptions()
    data, engine = spec.data, pool.engine
    prompt = assumed.mean_prompt or _MEAN_SHARE * data.prompt_length
    lengths = ResponseLengths(
        assumed.mean_response or _MEAN_SHARE * data.response_length, data.response_length, assumed.sigma
    )
    room = min(
        engine.max_running_requests // engine.attention_data_parallel,
        int(plan.engine_memory.kv_tokens // (prompt + lengths.mean)),
    )
    gpu = GPUS[engine.gpu_type]
    return StepModel(
        model=plan.model,
        workload=_workload(spec, plan, prompt, lengths),
        trainer=TrainingHardware(GPUS[spec.trainer.gpu_type], spec.trainer.gpus_per_node, plan.layout),
        rollout=RolloutHardware(
            gpu, engine.gpus_per_node, pool.replicas, plan.engine, max(room, 1), engine.is_deterministic
        ),
        transfer=_transfer(spec, pool, plan),
        efficiency=replace(of_trainer(spec.trainer), **assumed.shares),
        shared_gpus=spec.shares_gpus,
        spare_gpus=spec.trainer.spare_nodes * spec.trainer.gpus_per_node,
    )


def _workload(spec: GRPOJobSpec, plan: JobPlan, prompt: float, lengths: ResponseLengths) -> StepWorkload:
    trainer, algorithm = spec.trainer, spec.algorithm
    return StepWorkload(
        prompts=spec.data.train_batch_size,
        group=algorithm.samples_per_prompt,
        mini_batch=trainer.mini_batch_size,
        prompt=prompt,
        lengths=lengths,
        micro_batch=trainer.micro_batch_size_per_gpu,
        max_tokens=trainer.max_tokens_per_gpu,
        log_prob_micro_batch=trainer.log_prob_micro_batch_size_per_gpu,
        log_prob_max_tokens=trainer.log_prob_max_tokens_per_gpu,
        context=plan.layout.context,
        recompute=plan.recompute,
        offloaded=tuple(plan.offload.activations or ()),
        reference=algorithm.needs_reference,
        critic=algorithm.critic is not None,
        reward_model=bool(spec.reward and spec.reward.model),
        ahead=spec.staleness.max_version_lag > 0,
    )


def _transfer(spec: GRPOJobSpec, pool: RolloutTemplate, plan: JobPlan) -> Transfer:
    assert plan.model is not None
    trainer = spec.trainer
    gpu = GPUS[trainer.gpu_type]
    link = gpu.nvlink if spec.shares_gpus else gpu.network
    # Plans of transfers reach the bound of the interfaces.
    ends = plan.model, plan.layout, plan.engine, pool.replicas
    bound = sync_bound(*ends, link, pool.engine.gpus_per_node, spec.model.multi_token_prediction)
    return Transfer(
        update_bytes=bound.received_bytes,
        update_rate=bound.received_bytes / bound.seconds,
        tensors=hf_tensors(plan.model, fp8=plan.engine.fp8, mtp=plan.engine.drafts),
        checkpoint_bytes=max(stage.saved for stage in plan.stages),
        checkpoint_rate=HOST_RATE,
        checkpoint_steps=spec.checkpoint.every_steps,
    )


def with_efficiency(assumed: Assumptions, **shares: float | None) -> Assumptions:
    """Return the assumptions with some efficiencies given; None leaves one as it is measured."""
    return replace(assumed, shares={name: value for name, value in shares.items() if value is not None})
