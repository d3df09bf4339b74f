"""Estimates the time of the trainer's calls: ranks layouts, and is a part of the step plan (pure).

Each call is counted as :class:`Work`; rates and efficiencies turn the work into seconds. The same work is
counted for the cases that were measured, and the efficiencies are fitted to them (benchmarks/planner.py).
"""

import math
from dataclasses import dataclass, replace
from functools import cache

from grpo_operator.api.catalog.gpus import Gpu
from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.api.v1alpha1.offload import OffloadModule
from grpo_operator.api.v1alpha1.recompute import Recompute
from grpo_operator.api.v1alpha1.stages import chunk_counts, stage_counts
from grpo_operator.plan.planner.efficiency import HOST_RATE, MEASURED, Efficiency
from grpo_operator.plan.planner.model import parameters
from grpo_operator.plan.planner.model.shape import GqaShape, ModelShape
from grpo_operator.plan.planner.training.activations import Workload
from grpo_operator.plan.planner.training.flops import layer_flops, recomputed_share
from grpo_operator.plan.planner.training.offloaded import offloaded as offloaded_bytes
from grpo_operator.plan.planner.training.rank_parameters import on_rank, total
from grpo_operator.plan.planner.training.traffic import activation_bytes, weight_bytes

_BF16, _FP32 = 2, 4


@dataclass(frozen=True, slots=True)
class Rows:
    """Micro-batches of one data-parallel replica.

    ``count``: micro-batches. ``tokens``: of one micro-batch, with padding. ``attended``: tokens that one
    token attends to, on average. ``sequences``: packed into one micro-batch; 0: padded rows.
    """

    count: float
    tokens: float
    attended: float
    sequences: float = 0.0


@dataclass(frozen=True, slots=True)
class Work:
    """Work of the slowest stage in one call, without the pipeline's bubble.

    ``flops``: seconds of matrix products at the peak rate. ``activation``, ``weights``: seconds in which
    activations, and weights with their gradients, travel once through the GPU's memory at its peak rate.
    ``layers``, ``expert_layers``, ``experts``,
    ``sequences``: how often the host starts a layer, the experts of a layer, a local expert and the attention
    of a packed sequence. ``tensor``, ``expert``,
    ``context``: seconds of traffic at the peak rates of the links.
    """

    flops: float
    activation: float
    weights: float
    layers: float
    expert_layers: float
    experts: float
    sequences: float
    tensor: float
    expert: float
    context: float


@dataclass(frozen=True, slots=True)
class LayoutCost:
    """Seconds of one call on the slowest stage. ``launch``: time in which the GPU waits for the host.

    ``stages``: transfers between the chunks of virtual stages. ``offload``: time in which the GPU waits for
    copies to or from host memory. ``bubble``: idle time of the pipeline. ``gradients``: their reduction, and
    the optimizer.
    """

    compute: float
    launch: float
    tensor: float
    expert: float
    context: float
    stages: float
    offload: float
    bubble: float
    gradients: float

    @property
    def busy(self) -> float:
        """Return the seconds in which a stage works on its micro-batches."""
        computing = self.compute + self.launch + self.tensor + self.expert + self.context
        return computing + self.stages + self.offload

    @property
    def total(self) -> float:
        return self.busy + self.bubble + self.gradients

    @property
    def largest(self) -> str:
        """Return the name of the largest term besides computation."""
        names = ("launch", "tensor", "expert", "context", "stages", "offload", "bubble", "gradients")
        terms = {name: getattr(self, name) for name in names}
        return max(terms, key=lambda name: terms[name])


def update_cost(
    model: ModelShape,
    layout: Layout,
    workload: Workload,
    gpu: Gpu,
    gpus_per_node: int,
    efficiency: Efficiency = MEASURED,
) -> LayoutCost:
    """Return the cost of one optimizer step whose rows are all of the full length."""
    rows = Rows(
        workload.micro_batches,
        workload.sequence * workload.micro_batch,
        workload.sequence / 2,
    )
    passes = passes_of_update(model, layout, rows, workload.recompute)
    return call_cost(
        model, layout, rows, gpu, gpus_per_node,
        passes=passes, gradients=True, efficiency=efficiency, offloaded=workload.offloaded,
    )  # fmt: skip


def passes_of_update(model: ModelShape, layout: Layout, rows: Rows, recompute: Recompute) -> float:
    """Return the forward passes that an update costs: its own, two for backward, and what it recomputes.

    That part is the share of the operations of the slowest stage.
    """
    if recompute.layers is None:
        return 3 + recomputed_share(model, rows.attended, recompute)
    chunks = chunk_counts(model.layers, layout)
    slowest = max((chunks[stage :: layout.pipeline] for stage in range(layout.pipeline)), key=sum)
    return 3 + sum(min(count, recompute.layers) for count in slowest) / sum(slowest)


def call_cost(
    model: ModelShape,
    layout: Layout,
    rows: Rows,
    gpu: Gpu,
    gpus_per_node: int,
    *,
    passes: float,
    gradients: bool = False,
    efficiency: Efficiency = MEASURED,
    offloaded: tuple[OffloadModule, ...] = (),
) -> LayoutCost:
    """Return the cost of one call of all ranks.

    ``gradients``: it ends with an optimizer step. ``offloaded``: modules whose activations wait in host
    memory.
    """
    rows = _in_rounds(rows, layout)
    work = call_work(model, layout, rows, gpu, gpus_per_node, passes, gradients)
    compute = (
        work.flops / efficiency.flops
        + work.activation * efficiency.activation
        + work.weights * efficiency.weights
        + work.experts * efficiency.expert
    )
    launch = efficiency.host * (
        work.layers * efficiency.layer
        + work.expert_layers * efficiency.expert_layer
        + work.experts * efficiency.local_expert
        + work.sequences * efficiency.packed_sequence
    )
    if efficiency.runs_ahead:  # both times overlap, except where the host waits for the GPU
        launch = math.hypot(compute, launch) - compute
    tensor, expert, context = (t / efficiency.link for t in (work.tensor, work.expert, work.context))
    stages = _stages(model, layout, rows, gpu, gpus_per_node) * min(passes, 2) / efficiency.link
    step = 0.0
    if gradients:
        held = on_rank(total(model), layout) / layout.pipeline
        step = _gradients(model, layout, gpu) / efficiency.link + efficiency.optimizer * held / gpu.bandwidth
    cost = LayoutCost(compute, launch, tensor, expert, context, stages, 0.0, 0.0, step)
    copies = _copies(model, layout, rows, offloaded) if gradients else 0.0
    cost = replace(cost, offload=_exposed(copies, cost.busy, passes))
    idle = (layout.pipeline - 1) / (layout.virtual_pipeline * max(rows.count, 1))
    return replace(cost, bubble=cost.busy * idle)


def _in_rounds(rows: Rows, layout: Layout) -> Rows:
    """Return the micro-batches that ranks form: with virtual stages, a multiple of one for each stage."""
    if layout.virtual_pipeline == 1 or rows.count <= 1:
        return rows
    count = math.ceil(math.ceil(rows.count) / layout.pipeline) * layout.pipeline
    share = rows.count / count
    return Rows(count, rows.tokens * share, rows.attended, rows.sequences * share)


def _copies(model: ModelShape, layout: Layout, rows: Rows, modules: tuple[OffloadModule, ...]) -> float:
    """Return the seconds in which the fullest stage copies its activations to host memory, or back."""
    if not modules:
        return 0.0
    tokens = int(rows.tokens / layout.context)
    layer = offloaded_bytes(model, modules, model.layers - 1, tokens, layout.tensor)
    return layer.copied * _slowest(model.layers, layout) * rows.count / HOST_RATE


def _exposed(copies: float, busy: float, passes: float) -> float:
    """Return the seconds of copies that computation does not hide.

    Copies out run beside the forward passes, one of ``passes``, and copies back beside the backward passes.
    """
    forward = busy / passes
    return max(copies - forward, 0.0) + max(copies - (busy - forward), 0.0)


@cache
def _slowest(layers: int, layout: Layout) -> int:
    """Return the layers that one micro-batch waits for: of the stage with the most, in each round of chunks.

    Stages work through the chunks in rounds, and the one with the largest chunk sets the pace.
    """
    counts = chunk_counts(layers, layout)
    rounds = range(0, len(counts), layout.pipeline)
    return sum(max(counts[first : first + layout.pipeline]) for first in rounds)


def _stages(model: ModelShape, layout: Layout, rows: Rows, gpu: Gpu, gpus_per_node: int) -> float:
    """Return the seconds, in one direction, of transfers that virtual stages add at the links' peak rates.

    Megatron-Core waits for each of them. The transfers of plain stages are not counted: there is one for all
    layers of a stage.
    """
    speed = gpu.network if layout.world // layout.pipeline >= gpus_per_node else gpu.nvlink
    stream = rows.tokens / layout.context * model.hidden * _BF16 / layout.tensor
    return (layout.virtual_pipeline - 1) * rows.count * stream / speed


def call_work(
    model: ModelShape,
    layout: Layout,
    rows: Rows,
    gpu: Gpu,
    gpus_per_node: int,
    passes: float,
    gradients: bool = False,
) -> Work:
    """Count the work of ``passes`` forward passes over ``rows`` on the stage with the most layers.

    ``gradients``: some of these passes stand for a backward pass.
    """
    times = _slowest(model.layers, layout) * passes
    tokens = rows.tokens * rows.count / layout.context
    stream = tokens * model.hidden * _BF16 / layout.tensor
    flops = layer_flops(model, rows.attended)
    local = model.experts.count / layout.expert if model.experts else 0.0
    held = on_rank(total(model), layout) / layout.pipeline
    return Work(
        flops=flops * tokens * times / layout.tensor / gpu.flops,
        activation=activation_bytes(model) * tokens * times / layout.tensor / gpu.bandwidth,
        weights=rows.count * held * weight_bytes(passes, gradients) / gpu.bandwidth,
        layers=rows.count * times,
        expert_layers=rows.count * times * (1 - model.dense_layers / model.layers),
        experts=rows.count * times * local,
        sequences=rows.count * times * rows.sequences,
        tensor=_tensor(layout, gpu, gpus_per_node) * stream * times,
        expert=_expert(model, layout, gpu, gpus_per_node) * stream * times,
        context=_context(model, layout, gpu, gpus_per_node) * tokens * times,
    )


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


def _gradients(model: ModelShape, layout: Layout, gpu: Gpu) -> float:
    """Return the seconds to reduce gradients and gather weights over the data-parallel ranks."""
    layers = max(stage_counts(model.layers, layout))
    count = parameters.layer(model, model.layers - 1)
    dense = (count.split / layout.tensor + count.whole) * (layout.data * layout.context > 1)
    expert = count.expert / (layout.expert * layout.expert_tensor) * (layout.expert_data > 1)
    return layers * (dense + expert) * (_FP32 + _BF16) / gpu.network
