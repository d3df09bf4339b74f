"""Bytes on each GPU of the training pool, stage by stage (pure).

Model state follows Megatron-Core with the distributed optimizer: bf16 weights, fp32 gradients,
and fp32 main weights with Adam's two moments sharded over the ranks that hold the same weights.
Activations are those that a fused implementation keeps for the backward pass.
"""

from dataclasses import dataclass

from grpo_operator.api.v1alpha1 import trainer
from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.api.v1alpha1.stages import chunk_counts, stage_layers
from grpo_operator.api.v1alpha1.trainer import OffloadSpec
from grpo_operator.plan.planner.model import parameters
from grpo_operator.plan.planner.model.parameters import Count
from grpo_operator.plan.planner.model.shape import ModelShape
from grpo_operator.plan.planner.training.activations import Workload, layer_activations, logits_bytes


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes per parameter. ``optimizer`` is sharded over the ranks that hold the same weights.

    ``quantised``: of each parameter of the layers, for their FP8 values in the order of rows and of columns.
    """

    weights: int = 2
    gradients: int = 4
    optimizer: int = 12
    quantised: int = 0


BF16 = Precision()
_STEP = 4  # bytes per parameter of the shard: an fp32 copy during the optimizer step
FP32 = Precision(weights=4, gradients=4, optimizer=8)  # no separate main weights
FP8 = Precision(quantised=2)
_SAVED = 12  # bytes of a value's main weight and two moments in a checkpoint, which has them in fp32
_UNCOUNTED = 2**31  # place of a layer that is not among the first ones of its chunk, however many these are


def of_precision(precision: trainer.Precision) -> Precision:
    """Return the bytes per parameter of a trainer on GPUs."""
    return FP8 if precision is trainer.Precision.FP8_BLOCK128 else BF16


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes on one GPU of a stage.

    ``activations``: kept for the backward pass. ``working``: added to them at the peak. ``frozen``: weights
    of models without gradients. ``sync``: buffers of the weight sync. ``host``: host memory of the process.
    ``optimizer_shard``: main weights and moments that the rank keeps, wherever they are. ``saved``: bytes
    that the rank with the most writes to a checkpoint: the weights, which the first data-parallel rank
    writes, and the optimizer state, within a few megabytes of what it keeps.
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

    @property
    def state(self) -> int:
        """Return the bytes of weights, gradients and optimizer state."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> int:
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
    stages = stage_layers(model.layers, layout)
    models = 2 if critic else 1
    result = []
    for index, layers in enumerate(stages):
        count = _stage_count(model, layers, index, layout.pipeline)
        with_mtp = mtp and index == layout.pipeline - 1
        added = parameters.mtp_layer(model) if with_mtp else Count()
        one, local = on_rank(count, layout) * precision.weights, on_rank(count + added, layout)
        others = on_rank(count, layout) * (models - 1)  # the critic's
        shard = _sharded(count + added, layout) + _sharded(count, layout) * (models - 1)
        state = shard * precision.optimizer
        # One model computes at a time. With offload the others' weights and gradients are on the host, and
        # the optimizer state is on the GPU during the optimizer step only.
        weights = (local + (0 if offload.parameters else others)) * precision.weights
        inside = sum((parameters.layer(model, number) for number in layers), Count())
        weights += on_rank(inside, layout) * models * precision.quantised
        gradients = (local + (0 if offload.gradients else others)) * precision.gradients
        kept, working = _activations(model, layout, workload, layers, index, with_mtp)
        stepping = _sharded(count + added, layout) * precision.optimizer if offload.optimizer else 0
        stepping += 0 if fused_optimizer else _STEP * shard
        freed = local * precision.gradients if offload.gradients else 0
        apart = 0
        if (
            workload.log_prob_tokens is not None
        ):  # tensors of a layer that is recomputed as a whole, or logits
            forward = Workload(workload.log_prob_tokens)
            apart = _activations(model, layout, forward, layers, index, with_mtp)[1] - freed
        moved = ((local + others) * precision.weights + one * frozen) * offload.parameters
        moved += state * offload.optimizer
        checkpoint = shard * (precision.weights + precision.optimizer)
        result.append(
            StageMemory(
                stage=index,
                layers=len(layers),
                weights=weights,
                gradients=gradients,
                optimizer=0 if offload.optimizer else state,
                activations=kept,
                working=max(working, stepping - kept, apart - kept),
                frozen=0 if offload.parameters else one * frozen,
                sync=sync_buffers,
                host=moved + snapshots * checkpoint,
                optimizer_shard=state,
                saved=(local + others) * precision.weights + shard * _SAVED,
            )
        )
    return tuple(result)


def _stage_count(model: ModelShape, layers: tuple[int, ...], stage: int, stages: int) -> Count:
    count = sum((parameters.layer(model, index) for index in layers), Count())
    if stage == 0:
        count += parameters.embedding(model)
    if stage == stages - 1:
        count += parameters.head(model)
        if model.tied and stages > 1:  # the output needs the embedding too
            count += parameters.embedding(model)
    return count


def on_rank(count: Count, layout: Layout) -> int:
    """Return the parameters on one rank."""
    experts = layout.expert * layout.expert_tensor
    return count.split // layout.tensor + count.whole + count.expert // experts


def _sharded(count: Count, layout: Layout) -> int:
    """Return the parameters whose optimizer state one rank keeps."""
    dense = (count.split // layout.tensor + count.whole) // (layout.data * layout.context)
    experts = count.expert // (layout.expert * layout.expert_tensor)
    return dense + experts // layout.expert_data


def _activations(
    model: ModelShape,
    layout: Layout,
    workload: Workload,
    layers: tuple[int, ...],
    stage: int,
    with_mtp: bool,
) -> tuple[int, int]:
    """Return the bytes kept by the micro-batches in flight, and the largest addition to them.

    The addition is the logits, or the backward pass of a layer. ``with_mtp``: the stage has a
    multi-token-prediction layer, with logits of its own.
    """
    places = _places(model, layout, stage)
    if with_mtp:
        layers, places = (*layers, model.layers), [*places, _UNCOUNTED]
    each = [
        layer_activations(model, layout, workload, layer, place)
        for layer, place in zip(layers, places, strict=True)
    ]
    flight = _in_flight(layout, stage, workload)
    kept = sum(part.kept for part in each) * flight // layout.virtual_pipeline
    logits = logits_bytes(model, layout, workload) if stage == layout.pipeline - 1 else 0
    logits *= 2 if with_mtp else 1
    return kept, max([part.working for part in each] + [logits])


def _places(model: ModelShape, layout: Layout, stage: int) -> list[int]:
    """Return the place of each layer of a stage in its model chunk."""
    counts = chunk_counts(model.layers, layout)[stage :: layout.pipeline]
    return [place for count in counts for place in range(count)]


def _in_flight(layout: Layout, stage: int, workload: Workload) -> int:
    """Return the micro-batches (of one chunk each) whose activations a stage holds at once under 1F1B."""
    count = workload.micro_batches
    if layout.virtual_pipeline == 1:
        return min(layout.pipeline - stage + workload.overlap, count)
    warm_up = 2 * (layout.pipeline - stage - 1) + (layout.virtual_pipeline - 1) * layout.pipeline
    return min(warm_up + 1 + workload.overlap, count * layout.virtual_pipeline)
