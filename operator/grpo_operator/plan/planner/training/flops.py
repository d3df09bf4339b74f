"""Operations of one token in one layer (pure): of all that a forward pass computes, and of its modules."""

from grpo_operator.api.v1alpha1.recompute import Recompute, RecomputeKind, RecomputeModule
from grpo_operator.plan.planner.model import parameters
from grpo_operator.plan.planner.model.shape import ExpertShape, GqaShape, MlaShape, ModelShape


def layer_flops(model: ModelShape, attended: float) -> float:
    """Return the operations in an average layer. ``attended``: tokens that one token attends to."""
    return 2 * _active(model) + _attention(model, attended)


def recomputed_share(model: ModelShape, attended: float, recompute: Recompute) -> float:
    """Return the share of a forward pass that the backward pass repeats, on average over all layers.

    Norms and activation functions read and write memory and compute next to nothing.
    """
    if recompute.kind is RecomputeKind.FULL:
        return 1.0
    repeated = sum(_repeated(model, attended, module) for module in recompute.modules)
    return repeated / (model.layers * layer_flops(model, attended))


def _active(model: ModelShape) -> float:
    """Return the parameters that are multiplied with one token in an average layer; the embedding is not."""
    total = parameters.total(model)
    used = total.split + total.whole - (0 if model.tied else parameters.embedding(model).total)
    if model.experts is not None:
        used += total.expert * model.experts.top_k // model.experts.count
    return used / model.layers


def _attention(model: ModelShape, attended: float) -> float:
    """Return the operations of the scores and of the sum of values."""
    shape = model.attention
    if isinstance(shape, GqaShape):
        width = 2 * shape.head * model.heads
    else:
        width = (shape.nope + shape.rope + shape.value) * model.heads
    return 2 * width * attended


def _repeated(model: ModelShape, attended: float, module: RecomputeModule) -> float:
    """Return the operations of a module in all layers."""
    experts, dense = model.experts, model.dense_layers
    if module is RecomputeModule.CORE_ATTN:
        return model.layers * _attention(model, attended)
    if module is RecomputeModule.MLA_UP_PROJ and isinstance(model.attention, MlaShape):
        return 2.0 * model.layers * _up_projections(model, model.attention)
    if module is RecomputeModule.MLP:
        return 2.0 * dense * 3 * model.hidden * model.ffn
    if module is RecomputeModule.MOE and experts is not None:
        return 2.0 * (model.layers - dense) * _mixture(model, experts)
    if module is RecomputeModule.SHARED_EXPERTS and experts is not None:
        return 2.0 * (model.layers - dense) * 3 * model.hidden * experts.shared_ffn
    return 0.0


def _up_projections(model: ModelShape, shape: MlaShape) -> int:
    """Return the parameters that make queries, keys and values of their compressed forms."""
    query = (shape.q_rank or model.hidden) * (shape.nope + shape.rope)
    return model.heads * (query + shape.kv_rank * (shape.nope + shape.value))


def _mixture(model: ModelShape, experts: ExpertShape) -> int:
    """Return the parameters of router, shared experts and chosen experts."""
    return model.hidden * (experts.count + 3 * (experts.top_k * experts.ffn + experts.shared_ffn))
