"""Searches for feasible layouts: the fastest one, or the one nearest to a given layout (pure)."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from grpo_operator.api.catalog.gpus import Gpu
from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.api.v1alpha1.moe import MoeSpec
from grpo_operator.api.v1alpha1.offload import OffloadSpec
from grpo_operator.api.v1alpha1.recompute import FULL, Recompute
from grpo_operator.api.v1alpha1.stages import uneven
from grpo_operator.plan.planner.efficiency import HOST_RATE, MEASURED, Efficiency
from grpo_operator.plan.planner.model.shape import ModelShape
from grpo_operator.plan.planner.training.activations import Workload
from grpo_operator.plan.planner.training.communicators import nccl_bytes
from grpo_operator.plan.planner.training.cost import LayoutCost, update_cost
from grpo_operator.plan.planner.training.memory import (
    BF16,
    Precision,
    StageMemory,
    least_bytes,
    optimizer_bytes,
    stage_memory,
)
from grpo_operator.plan.planner.training.rules import batch_problems, fp8_problems, packing_problems, problems

_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_CHUNKS = (2, 4, 8)  # of a virtual pipeline; each further one saves less of the bubble
# Shares of a GPU's memory that auto leaves free, beside what is reserved for libraries and fragmentation. The
# planned memory of held-out updates was at most 2.6 % off (benchmarks/results/trainer.json). With
# Megatron-Core's own kernels it was up to 9.0 % too low (benchmarks/results/planner.json).
MARGIN, LOCAL_MARGIN = 0.04, 0.09


@dataclass(frozen=True, slots=True)
class TrainingPool:
    """Hardware, model and batch that a layout is searched for.

    ``sequences``: of one optimizer step, over all replicas. ``sequence``: tokens of prompt and response.
    ``sync_buffers``: bytes held for weight sync. ``frozen``: models without gradients beside the policy.
    ``critic``: a critic is trained too. ``max_tokens``: a forward pass packs sequences up to this number of
    tokens on each GPU, instead of ``micro_batch`` padded sequences. ``log_prob_micro_batch``,
    ``log_prob_max_tokens``: those of passes without gradients; None: the same. ``mtp``: the policy trains
    its multi-token-prediction layer. ``moe``: how its experts are trained. ``fused``: Transformer
    Engine computes the layers. ``margin``: share of the GPU's memory that a chosen layout leaves free.
    ``links``: engines that get weights over NCCL; None: the ranks do not use NCCL.
    """

    model: ModelShape
    gpu: Gpu
    world: int
    gpus_per_node: int
    sequences: int
    sequence: int
    micro_batch: int
    max_tokens: int | None = None
    log_prob_micro_batch: int | None = None
    log_prob_max_tokens: int | None = None
    recompute: Recompute = FULL
    fp8_sync: bool = False
    sync_buffers: int = 0
    frozen: int = 0
    critic: bool = False
    precision: Precision = BF16
    offload: OffloadSpec = field(default_factory=OffloadSpec)
    mtp: bool = False
    moe: MoeSpec = field(default_factory=MoeSpec)
    efficiency: Efficiency = MEASURED
    fused: bool = False
    margin: float = MARGIN
    links: int | None = None

    @property
    def safe(self) -> int:
        """Return the bytes of a GPU that a chosen layout may take."""
        return self.gpu.usable - int(self.margin * self.gpu.memory)

    def workload(self, layout: Layout) -> Workload:
        common: dict[str, Any] = {
            "recompute": self.recompute,
            "log_prob_tokens": self.log_prob_tokens(layout),
            "offloaded": tuple(self.offload.activations or ()),
            "overlap": self.moe.overlap_communication,
            "fused": self.fused,
            "fp8": self.precision.quantised > 0,
        }
        if self.max_tokens:
            tokens = self.max_tokens * layout.context
            count = max(self.sequences * self.sequence // (layout.data * tokens), 1)
            if layout.virtual_pipeline > 1:
                count = -(-count // layout.pipeline) * layout.pipeline
            return Workload(tokens, 1, count, **common)
        count = max(self.sequences // (layout.data * self.micro_batch), 1)
        return Workload(self.sequence, self.micro_batch, count, **common)

    def log_prob_tokens(self, layout: Layout) -> int | None:
        """Return the tokens of a micro-batch in passes without gradients; None: those of the update."""
        if self.log_prob_max_tokens:
            return self.log_prob_max_tokens * layout.context
        return self.sequence * self.log_prob_micro_batch if self.log_prob_micro_batch else None

    def memory(self, layout: Layout) -> tuple[StageMemory, ...]:
        stages = stage_memory(
            self.model,
            layout,
            self.workload(layout),
            precision=self.precision,
            sync_buffers=self.sync_buffers,
            frozen=self.frozen,
            critic=self.critic,
            offload=self.offload,
            mtp=self.mtp,
        )
        if self.links is None:
            return stages
        return tuple(
            replace(
                stage, nccl=nccl_bytes(self.model, layout, stage.stage, links=self.links, mtp=self.mtp)
            )
            for stage in stages
        )

    def cost(self, layout: Layout) -> LayoutCost:
        """Return the cost of an optimizer step, with the copies of an offloaded optimizer's state."""
        cost = update_cost(
            self.model, layout, self.workload(layout), self.gpu, self.gpus_per_node, self.efficiency
        )
        if not self.offload.optimizer:
            return cost
        state = optimizer_bytes(self.model, layout, self.precision)
        return replace(cost, offload=cost.offload + 2 * state / HOST_RATE)

    def problems(self, layout: Layout) -> list[str]:
        """Return every reason except memory why the layout cannot run."""
        messages = problems(self.model, layout)
        if (problem := self.moe.overlap_problem(layout, self.recompute)) is not None:
            messages.append(problem)
        if self.max_tokens:
            messages += packing_problems(layout, self.sequences)
        else:
            messages += batch_problems(layout, self.sequences, self.micro_batch)
            if self.log_prob_micro_batch:
                messages += batch_problems(
                    layout, self.sequences, self.log_prob_micro_batch, "logProbMicroBatchSizePerGpu"
                )
        return messages + (fp8_problems(self.model, layout) if self.fp8_sync else [])


def worst(stages: tuple[StageMemory, ...]) -> StageMemory:
    """Return the stage that needs the most memory."""
    return max(stages, key=lambda stage: stage.total)


def fits(pool: TrainingPool, layout: Layout) -> bool:
    """Return whether no rule refuses the layout and every GPU has enough memory for it."""
    return _takes(pool, layout, pool.gpu.usable)


def is_safe(pool: TrainingPool, layout: Layout) -> bool:
    """Return whether the layout fits even where the planned memory is wrong by the margin."""
    return _takes(pool, layout, pool.safe)


def _takes(pool: TrainingPool, layout: Layout, most: int) -> bool:
    """Return whether no rule refuses the layout and no GPU needs more than ``most`` bytes."""
    if least_bytes(pool.model, layout, pool.precision, pool.offload) > most or pool.problems(layout):
        return False
    return worst(pool.memory(layout)).total <= most


def candidates(pool: TrainingPool) -> Iterator[Layout]:
    """Yield layouts whose sizes divide the world size; tensor parallelism stays within a node."""
    experts = pool.model.experts
    expert_sizes = [1] if experts is None else [s for s in _SIZES if experts.count % s == 0]
    for tensor in (s for s in _SIZES if s <= pool.gpus_per_node):
        for pipeline in range(1, min(pool.world, pool.model.layers) + 1):
            if pool.world % (tensor * pipeline):
                continue
            for context in (s for s in _SIZES if (s <= 16 and pool.sequence // s >= 1024) or s == 1):
                for expert in expert_sizes:
                    expert_tensor = tensor if expert == 1 else 1
                    try:
                        layout = Layout(pool.world, tensor, pipeline, context, expert, expert_tensor)
                    except ValueError:
                        continue
                    yield _with_stages(pool.model.layers, layout)
                    yield from _with_chunks(pool.model.layers, layout)


def _with_chunks(layers: int, layout: Layout) -> Iterator[Layout]:
    """Yield the layout with virtual stages, whose chunks differ by one layer at most."""
    if layout.pipeline == 1:
        return
    for chunks in _CHUNKS:
        if layout.pipeline * chunks <= layers:
            yield replace(layout, virtual_pipeline=chunks)


def _with_stages(layers: int, layout: Layout) -> Layout:
    if layers % layout.pipeline == 0:
        return layout
    split = uneven(layers, layout.pipeline)
    if split is None:
        return layout
    return replace(layout, layers_in_first_stage=split[0], layers_in_last_stage=split[1])


def feasible(pool: TrainingPool) -> list[Layout]:
    """Return the layouts that fit, the fastest by :func:`update_cost` first, then by their text."""
    layouts = [layout for layout in candidates(pool) if fits(pool, layout)]
    return sorted(layouts, key=lambda layout: (pool.cost(layout).total, str(layout)))


@dataclass(frozen=True, slots=True)
class Choice:
    """A layout of a pool, and the pool with what is recomputed and offloaded in it."""

    pool: TrainingPool
    layout: Layout

    @property
    def cost(self) -> LayoutCost:
        return self.pool.cost(self.layout)


def choices(pools: Sequence[TrainingPool]) -> list[Choice]:
    """Return each safe layout with the fastest of the pools.

    These differ in what they recompute and offload.
    """
    found: dict[Layout, tuple[float, Choice]] = {}
    for pool in pools:
        for layout in candidates(pool):
            if is_safe(pool, layout):
                seconds = pool.cost(layout).total
                if layout not in found or seconds < found[layout][0]:
                    found[layout] = seconds, Choice(pool, layout)
    ranked = sorted(found.values(), key=lambda each: (each[0], str(each[1].layout)))
    return [choice for _, choice in ranked]


def chosen(pools: Sequence[TrainingPool], layout: Layout) -> Choice:
    """Return a given layout with the fastest of the pools in which it is safe, or else fits.

    If it fits in none, the one that needs the least memory.
    """
    for test in (is_safe, fits):
        if fitting := [Choice(pool, layout) for pool in pools if test(pool, layout)]:
            return min(fitting, key=lambda choice: choice.cost.total)
    return Choice(min(pools, key=lambda pool: worst(pool.memory(layout)).total), layout)


def nearest(pool: TrainingPool, given: Layout) -> Layout | None:
    """Return the feasible layout that is the fewest doublings and halvings of sizes away from ``given``."""

    def distance(layout: Layout) -> float:
        pairs = (
            (layout.tensor, given.tensor),
            (layout.pipeline, given.pipeline),
            (layout.context, given.context),
            (layout.expert, given.expert),
            (layout.expert_tensor, given.expert_tensor),
            (layout.virtual_pipeline, given.virtual_pipeline),
        )
        return sum(abs(math.log2(a / b)) for a, b in pairs)

    return min(feasible(pool), key=lambda layout: (distance(layout), pool.cost(layout).total), default=None)
