"""Bytes on each GPU of the training pool, stage by stage (pure).

Model state follows Megatron-Core with the distributed optimizer: bf16 weights, fp32 gradients,
and fp32 main weights with Adam's two moments sharded over the ranks that hold the same weights. The
precision-aware optimizer keeps gradients and moments in fewer bytes, and of the main weights only what bf16
weights lack of them.
Activations are those that a fused implementation keeps for the backward pass.
"""

from collections import Counter
from dataclasses import dataclass, replace

from grpo_operator.api.v1alpha1 import trainer
from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.api.v1alpha1.offload import OffloadSpec
from grpo_operator.api.v1alpha1.optimizer_dtypes import OptimizerDtypes
from grpo_operator.api.v1alpha1.stages import chunk_counts
from grpo_operator.plan.planner.model import parameters
from grpo_operator.plan.planner.model.parameters import Count
from grpo_operator.plan.planner.model.shape import ModelShape
from grpo_operator.plan.planner.training.activations import Workload, layer_activations, logits_bytes
from grpo_operator.plan.planner.training.fused_activations import scratch_bytes
from grpo_operator.plan.planner.training.rank_parameters import (
    largest_chunks,
    of_ends,
    of_layers,
    on_rank,
    sharded,
    shards,
    total,
)


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes per parameter. ``optimizer`` is sharded over the ranks that hold the same weights.

    ``stepping``: fp32 copies of such a shard's narrower moments, which one optimizer has while it steps.
    ``quantised``: of each parameter of the layers, for their FP8 values in the order of rows and of columns.
    """

    weights: int = 2
    gradients: int = 4
    optimizer: int = 12
    stepping: int = 0
    quantised: int = 0


BF16 = Precision()
_STEP = 4  # bytes per parameter of the shard: an fp32 copy during the optimizer step
FP32 = Precision(weights=4, gradients=4, optimizer=8)  # no separate main weights
FP8 = Precision(quantised=2)
_SAVED = 12  # bytes of a value's main weight and two moments in a checkpoint, which has them in fp32
Place = tuple[bool, int]  # whether a layer has experts, and its place in its model chunk
_UNCOUNTED = 2**31  # place of a layer that is not among the first ones of its chunk, however many these are


_FP32_STATE = OptimizerDtypes()
_REMAINDER = 2  # bytes of a main weight beside the bf16 weight


def of_precision(precision: trainer.Precision, dtypes: OptimizerDtypes = _FP32_STATE) -> Precision:
    """Return the bytes per parameter of a trainer on GPUs."""
    found = FP8 if precision is trainer.Precision.FP8_BLOCK128 else BF16
    if not dtypes.narrow:
        return found
    moments = [dtype.width for dtype in (dtypes.exp_avg_dtype, dtypes.exp_avg_sq_dtype)]
    return replace(
        found,
        gradients=dtypes.main_grads_dtype.width,
        optimizer=_REMAINDER + sum(moments),
        stepping=4 * sum(width < 4 for width in moments),
    )


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes on one GPU of a stage.

    ``activations``: kept for the backward pass. ``working``: added to them at the peak. ``frozen``: weights
    of models without gradients. ``sync``: buffers of the weight sync. ``host``: host memory of the process,
    of which ``copied`` are offloaded activations. ``nccl``: communicators, beside PyTorch's allocator.
    ``optimizer_shard``: main weights and moments that the rank keeps, wherever they are. ``saved``: bytes
    that the rank with the most writes to a checkpoint: the weights, which the first data-parallel rank
    writes, and as much optimizer state as it keeps. ``chunks``: what it may write beyond that, because the
    ranks share no chunk.
    """

    stage: int
    layers: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    working: int
    frozen: int
    sync: int
    host: int
    optimizer_shard: int
    saved: int
    chunks: int
    copied: int = 0
    nccl: int = 0

    @property
    def state(self) -> int:
        """Return the bytes of weights, gradients and optimizer state."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        return self.allocated + self.nccl

    @property
    def allocated(self) -> int:
        """Return the bytes of PyTorch's allocator."""
        return self.state + self.activations + self.working + self.frozen + self.sync


def stage_memory(
    model: ModelShape,
    layout: Layout,
    workload: Workload,
    *,
    precision: Precision = BF16,
    offload: OffloadSpec | None = None,
    sync_buffers: int = 0,
    frozen: int = 0,
    critic: bool = False,
    snapshots: int = 0,
    fused_optimizer: bool = True,
    mtp: bool = False,
) -> tuple[StageMemory, ...]:
    """Return the memory of each stage.

    ``sync_buffers``: bytes that the weight sync holds on the GPU. ``frozen``: number of further models of the
    policy's size without gradients. ``critic``: a critic of the policy's size is trained too. ``snapshots``:
    copies of the rank's checkpoint shard in host memory. ``fused_optimizer``: Adam of Transformer Engine or
    Apex; PyTorch's own needs an fp32 copy of the shard while it steps. ``mtp``: the policy trains its
    multi-token-prediction layer. Raises ValueError when the layers cannot be split into the stages.
    """
    offload = offload or OffloadSpec()
    chunks = chunk_counts(model.layers, layout)
    models = 2 if critic else 1
    result = []
    for index in range(layout.pipeline):
        places = _places(model, layout, chunks, index)
        dense = sum(number for (has_experts, _), number in places.items() if not has_experts)
        inside = of_layers(model, dense, sum(places.values()) - dense)
        count = inside + of_ends(model, index, layout.pipeline)
        with_mtp = mtp and index == layout.pipeline - 1
        added = parameters.mtp_layer(model) if with_mtp else Count()
        one, local = on_rank(count, layout) * precision.weights, on_rank(count + added, layout)
        others = on_rank(count, layout) * (models - 1)  # the critic's
        shard = sharded(count + added, layout) + sharded(count, layout) * (models - 1)
        state = shard * precision.optimizer
        # One model computes at a time. With offload the others' weights and gradients are on the host, and
        # the optimizer state is on the GPU during the optimizer step only.
        weights = (local + (0 if offload.parameters else others)) * precision.weights
        weights += on_rank(inside, layout) * models * precision.quantised
        gradients = (local + (0 if offload.gradients else others)) * precision.gradients
        kept, working, copied = _activations(model, layout, workload, places, index, with_mtp)
        stepping = sharded(count + added, layout) * precision.optimizer if offload.optimizer else 0
        stepping += 0 if fused_optimizer else _STEP * shard
        stepping += precision.stepping * max(shards(count + added, layout))
        freed = local * precision.gradients if offload.gradients else 0
        apart = 0
        if workload.log_prob_tokens is not None:
            # Tensors of a layer that is recomputed as a whole, or logits.
            forward = Workload(workload.log_prob_tokens, fused=workload.fused, fp8=workload.fp8)
            apart = _activations(model, layout, forward, places, index, with_mtp)[1] - freed
        scratch = (
            scratch_bytes(model, layout, dense > 0, sum(places.values()) > dense) if workload.fused else 0
        )
        moved = ((local + others) * precision.weights + one * frozen) * offload.parameters
        moved += state * offload.optimizer
        checkpoint = shard * (precision.weights + precision.optimizer)
        result.append(
            StageMemory(
                stage=index,
                layers=sum(places.values()),
                weights=weights,
                gradients=gradients,
                optimizer=0 if offload.optimizer else state,
                activations=kept,
                working=max(working, stepping - kept, apart - kept) + scratch,
                frozen=0 if offload.parameters else one * frozen,
                sync=sync_buffers,
                host=moved + snapshots * checkpoint + copied,
                optimizer_shard=state,
                saved=(local + others) * precision.weights + shard * _SAVED,
                chunks=largest_chunks(model, layout) * models * _SAVED,
                copied=copied,
            )
        )
    return tuple(result)


def optimizer_bytes(model: ModelShape, layout: Layout, precision: Precision) -> int:
    """Return the bytes of optimizer state that a rank keeps, on average over the stages."""
    return sharded(total(model), layout) * precision.optimizer // layout.pipeline


def least_bytes(model: ModelShape, layout: Layout, precision: Precision, offload: OffloadSpec) -> int:
    """Return a lower bound of the fullest stage's bytes: the state of an average stage."""
    held = on_rank(total(model), layout) * (precision.weights + precision.gradients)
    kept = 0 if offload.optimizer else optimizer_bytes(model, layout, precision)
    return held // layout.pipeline + kept


def _activations(
    model: ModelShape,
    layout: Layout,
    workload: Workload,
    places: Counter[Place],
    stage: int,
    with_mtp: bool,
) -> tuple[int, int, int]:
    """Return the bytes kept by the micro-batches in flight, the largest addition, and bytes in host memory.

    The addition is the logits, or the backward pass of a layer. ``with_mtp``: the stage has a
    multi-token-prediction layer, with logits of its own.
    """
    if with_mtp:
        places = places + Counter({(model.experts is not None, _UNCOUNTED): 1})
    each = [
        (layer_activations(model, layout, workload, model.layers if has_experts else 0, place), number)
        for (has_experts, place), number in _alike(places, workload).items()
    ]
    flight = _in_flight(layout, stage, workload)
    kept = sum(part.kept * number for part, number in each) * flight // layout.virtual_pipeline
    copied = sum(part.copied * number for part, number in each) * flight // layout.virtual_pipeline
    logits = logits_bytes(model, layout, workload) if stage == layout.pipeline - 1 else 0
    logits *= 2 if with_mtp else 1
    return kept, max([part.working for part, _ in each] + [logits]), copied


def _places(model: ModelShape, layout: Layout, chunks: tuple[int, ...], stage: int) -> Counter[Place]:
    """Return the layers of a stage by their kind and place. ``chunks``: number of layers of each."""
    found: Counter[Place] = Counter()
    for chunk in range(stage, len(chunks), layout.pipeline):
        first = sum(chunks[:chunk])
        found.update((first + place >= model.dense_layers, place) for place in range(chunks[chunk]))
    return found


def _alike(places: Counter[Place], workload: Workload) -> Counter[Place]:
    """Return the places with those merged whose layers recompute the same."""
    merged: Counter[Place] = Counter()
    for (has_experts, place), number in places.items():
        counted = workload.recompute.layers is not None
        merged[has_experts, place if counted else 0] += number
    return merged


def _in_flight(layout: Layout, stage: int, workload: Workload) -> int:
    """Return the micro-batches (of one chunk each) whose activations a stage holds at once under 1F1B."""
    count = workload.micro_batches
    if layout.virtual_pipeline == 1:
        return min(layout.pipeline - stage + workload.overlap, count)
    warm_up = 2 * (layout.pipeline - stage - 1) + (layout.virtual_pipeline - 1) * layout.pipeline
    return min(warm_up + 1 + workload.overlap, count * layout.virtual_pipeline)
