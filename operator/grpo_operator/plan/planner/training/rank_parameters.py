"""Parameters on one rank: those that it computes with, and those whose optimizer state it keeps (pure)."""

from functools import cache

from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.plan.planner.model import parameters
from grpo_operator.plan.planner.model.parameters import Count
from grpo_operator.plan.planner.model.shape import ModelShape

CHUNK = 2**24  # values of a chunk of a checkpoint at most, where its tensor can be cut


def of_layers(model: ModelShape, dense: int, with_experts: int) -> Count:
    """Return the parameters of a stage's layers, from the number of each kind."""
    kinds = ((0, dense), (model.layers, with_experts))
    return sum((parameters.layer(model, layer) * number for layer, number in kinds if number), Count())


def of_ends(model: ModelShape, stage: int, stages: int) -> Count:
    """Return the parameters of a stage beside its layers."""
    count = Count()
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


@cache
def total(model: ModelShape) -> Count:
    """Return the parameters of the whole model."""
    return parameters.total(model)


def sharded(count: Count, layout: Layout) -> int:
    """Return the parameters whose optimizer state one rank keeps."""
    return sum(shards(count, layout))


def shards(count: Count, layout: Layout) -> tuple[int, int]:
    """Return those of the optimizer of dense weights, and of the experts'."""
    dense = (count.split // layout.tensor + count.whole) // (layout.data * layout.context)
    experts = count.expert // (layout.expert * layout.expert_tensor)
    return dense, experts // layout.expert_data


def largest_chunks(model: ModelShape, layout: Layout) -> int:
    """Return the values of the largest chunk of dense weights, and of one of experts.

    Megatron-Core does not let gate and up projection, which are one tensor, be cut.
    """
    experts = model.experts
    ffn = model.ffn if experts is None else max(model.ffn, experts.shared_ffn)
    dense = max(CHUNK, 2 * model.hidden * ffn // layout.tensor)
    return dense + (0 if experts is None else 2 * model.hidden * experts.ffn // layout.expert_tensor)
