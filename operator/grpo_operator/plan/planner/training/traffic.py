"""Bytes that the trainer moves within a GPU's memory beside its matrix products (pure)."""

from grpo_operator.plan.planner.model.shape import ExpertShape, GqaShape, ModelShape

_BF16, _FP32 = 2, 4
_HIDDEN = 8  # tensors as wide as the residual stream that a layer writes: norms, sums, inputs of both halves


def activation_bytes(model: ModelShape) -> float:
    """Return the bytes that one token writes in an average layer in a forward pass.

    The logits count as a part of each layer.
    """
    dense = model.dense_layers
    layers = model.layers * (_HIDDEN * model.hidden + _attention(model)) + dense * 3 * model.ffn
    if model.experts is not None:
        layers += (model.layers - dense) * _mixture(model, model.experts)
    return (_BF16 * layers + _FP32 * model.vocabulary) / model.layers


def weight_bytes(passes: float, gradients: bool) -> float:
    """Return the bytes that a micro-batch moves for each parameter on the rank.

    Each pass reads the weights. ``gradients``: they are added up in fp32, read and written.
    """
    return _BF16 * passes + (2 * _FP32 if gradients else 0)


def _attention(model: ModelShape) -> int:
    """Return the values of queries, keys, values, and sums of values, compressed ones included."""
    shape = model.attention
    if isinstance(shape, GqaShape):
        return 2 * shape.head * (model.heads + shape.kv_heads)
    each = 2 * (shape.nope + shape.rope) + 2 * shape.value
    return model.heads * each + (shape.q_rank or 0) + shape.kv_rank


def _mixture(model: ModelShape, experts: ExpertShape) -> int:
    """Return the values inside the experts, and the tokens that are sorted by expert and back."""
    return 3 * (experts.top_k * experts.ffn + experts.shared_ffn) + 2 * experts.top_k * model.hidden
