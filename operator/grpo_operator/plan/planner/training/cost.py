"""Estimates the time of a step by a roofline model, to rank the layouts that fit (pure).

Only the order of layouts matters: each term is a lower bound of one cost, with the same assumptions for every
layout, and the largest term explains the choice.
"""

from dataclasses import dataclass

from grpo_operator.api.catalog.gpus import Gpu
from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.plan.planner.model import parameters
from grpo_operator.plan.planner.model.shape import GqaShape, ModelShape
from grpo_operator.plan.planner.training.activations import Workload
from grpo_operator.plan.planner.training.stages import stage_counts

_BF16, _FP32 = 2, 4
_EFFICIENCY = 0.4  # share of peak FLOPS that large bf16 matrix products reach in training


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of one optimizer step on the slowest stage. ``bubble``: idle time of the pipeline."""

    compute: float
    tensor: float
    expert: float
    context: float
    bubble: float
    gradients: float

    @property
    def total(self) -> float:
        return self.compute + self.tensor + self.expert + self.context + self.bubble + self.gradients

    @property
    def largest(self) -> str:
        """Return the name of the largest term besides computation."""
        terms = {k: getattr(self, k) for k in ("tensor", "expert", "context", "bubble", "gradients")}
        return max(terms, key=lambda name: terms[name])


def step_cost(
    model: ModelShape, layout: Layout, workload: Workload, gpu: Gpu, gpus_per_node: int
) -> StepCost:
    """Return the cost of one optimizer step of ``workload.micro_batches`` micro-batches."""
    layers = max(stage_counts(model.layers, layout))
    tokens = workload.tokens(layout) * workload.micro_batches
    passes = 4 if workload.recompute else 3  # forward, backward (twice the FLOPS), and recomputed forward
    flops = 2 * passes * _active_per_layer(model) * layers * tokens / layout.tensor
    stream = tokens * model.hidden * _BF16 / layout.tensor
    compute = flops / (gpu.flops * _EFFICIENCY)
    tensor = _tensor(layout, gpu, gpus_per_node) * stream * layers * passes
    expert = _expert(model, layout, gpu, gpus_per_node) * stream * layers * passes
    context = _context(model, layout, gpu, gpus_per_node) * tokens * layers * passes
    busy = compute + tensor + expert + context
    idle = (layout.pipeline - 1) / (layout.virtual_pipeline * workload.micro_batches)
    return StepCost(compute, tensor, expert, context, busy * idle, _gradients(model, layout, gpu, layers))


def _active_per_layer(model: ModelShape) -> float:
    """Return the parameters that one token uses in an average layer."""
    total = parameters.total(model)
    used = total.split + total.whole
    if model.experts is not None:
        used += total.expert * model.experts.top_k // model.experts.count
    return used / model.layers


def _tensor(layout: Layout, gpu: Gpu, gpus_per_node: int) -> float:
    """Return seconds per byte of the residual stream: a gather and a scatter around each half-layer."""
    speed = gpu.nvlink if layout.tensor <= gpus_per_node else gpu.network
    return 4 * (layout.tensor - 1) / speed


def _expert(model: ModelShape, layout: Layout, gpu: Gpu, gpus_per_node: int) -> float:
    """Return seconds per byte of the residual stream: each token travels to top_k experts and back."""
    if model.experts is None:
        return 0.0
    inside = min(gpus_per_node / layout.expert, 1.0)
    share = (layout.expert - 1) / layout.expert
    dispatch = share * ((1 - inside) / gpu.network + inside / gpu.nvlink)
    shared = (layout.expert_tensor - 1) / gpu.nvlink  # every copy goes to all GPUs that share the expert
    return 2 * model.experts.top_k * (dispatch + shared)


def _context(model: ModelShape, layout: Layout, gpu: Gpu, gpus_per_node: int) -> float:
    """Return seconds per token: keys and values travel once around the ring."""
    shape = model.attention
    if isinstance(shape, GqaShape):
        width = 2 * shape.kv_heads * shape.head
    else:
        width = model.heads * (shape.nope + shape.rope + shape.value)
    speed = gpu.nvlink if layout.tensor * layout.context <= gpus_per_node else gpu.network
    return (layout.context - 1) * width * _BF16 / (layout.tensor * speed)


def _gradients(model: ModelShape, layout: Layout, gpu: Gpu, layers: int) -> float:
    """Return the seconds to reduce gradients and gather weights over the data-parallel ranks."""
    count = parameters.layer(model, model.layers - 1)
    dense = (count.split / layout.tensor + count.whole) * (layout.data * layout.context > 1)
    expert = count.expert / (layout.expert * layout.expert_tensor) * (layout.expert_data > 1)
    return layers * (dense + expert) * (_FP32 + _BF16) / gpu.network
