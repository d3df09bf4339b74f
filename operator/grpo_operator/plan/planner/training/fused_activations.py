"""Bytes of activations that a layer of Transformer Engine keeps for its backward pass (pure).

Counted from the tensors that were alive at the peak of updates on an H100, by the function that allocated
them: GLM-4.5-Air, Kimi-K2 and DeepSeek-V3 in bf16 and FP8 (benchmarks/gpu/peak_tensors.py).
"""

from dataclasses import dataclass

from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.api.v1alpha1.recompute import RecomputeModule
from grpo_operator.plan.planner.model.shape import GqaShape, MlaShape, ModelShape

_BF16, _FP32 = 2, 4
_FP8 = 1 + _FP32 / 128  # a value, and its share of a block's scale
# Copies of the routed tokens at the end of a layer's forward pass: permuted by expert before, from the last
# product, and permuted back. FP8 pads them to a multiple of rows before, and removes that after.
_COPIES, _COPIES_FP8 = 3, 5
_STREAMS, _WORKSPACE = 4, 2**25  # of cuBLAS for grouped products, on Hopper


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """Bytes per token. ``passing``: those that only the end of the layer's forward pass has, not kept."""

    norms: int
    attention: int
    feed_forward: int
    passing: int = 0

    @property
    def kept(self) -> int:
        return self.norms + self.attention + self.feed_forward


def layer_bytes(model: ModelShape, layer: int, fp8: bool) -> LayerBytes:
    """Return what a layer keeps without recomputation."""
    experts = model.experts if layer >= model.dense_layers else None
    product = _FP8 if fp8 else _BF16  # of a value that only a matrix product reads
    inputs = (
        2 if fp8 and isinstance(model.attention, MlaShape) else 1
    )  # each down projection quantises its own
    # The residual stream before attention and before the feed-forward, and both after their norms. The router
    # and the shared experts read the second one, in bf16.
    norms = model.hidden * (2 * _BF16 + inputs * product + (product if experts is None else _BF16))
    if experts is None:
        return LayerBytes(int(norms), _attention(model, product), _gated(model.ffn, product))
    routed = experts.top_k * (int(product * model.hidden) + _gated(experts.ffn, product))
    # Probabilities of the fused router, its logits, and what it chose.
    router = 3 * experts.count * _FP32
    copies = (_COPIES_FP8 if fp8 else _COPIES) * model.hidden + experts.ffn * fp8
    return LayerBytes(
        int(norms),
        _attention(model, product),
        routed + router + _gated(experts.shared_ffn, product),
        passing=_BF16 * experts.top_k * copies,
    )


def recomputed_bytes(
    model: ModelShape, layer: int, modules: tuple[RecomputeModule, ...], fp8: bool
) -> tuple[int, int]:
    """Return bytes per token that attention and feed-forward do not keep, because they compute them again.

    What is recomputed is saved in bf16, if at all. Flash attention keeps its output in any case.
    """
    shape, whole = model.attention, layer_bytes(model, layer, fp8)
    experts = model.experts if layer >= model.dense_layers else None
    product = _FP8 if fp8 else _BF16
    attention = feed_forward = 0
    if RecomputeModule.LAYERNORM in modules:
        second = product if experts is None else _BF16
        feed_forward = int(second * model.hidden)
        attention = whole.norms - 2 * _BF16 * model.hidden - feed_forward
    if RecomputeModule.MLA_UP_PROJ in modules and isinstance(shape, MlaShape):
        attention += _BF16 * model.heads * (2 * (shape.nope + shape.rope) + shape.value)
    if experts is None:
        return attention, feed_forward + whole.feed_forward * (RecomputeModule.MLP in modules)
    parts = {
        RecomputeModule.MOE: whole.feed_forward,
        RecomputeModule.MOE_ACT: int(product * experts.top_k * experts.ffn),
        RecomputeModule.SHARED_EXPERTS: _gated(experts.shared_ffn, product),
    }
    return attention, feed_forward + sum(parts.get(module, 0) for module in modules)


def scratch_bytes(model: ModelShape, layout: Layout, dense: bool, experts: bool) -> int:
    """Return bytes that a rank's process holds from its first step on, whatever the number of layers.

    Transformer Engine adds gradients to their buffer within the product, and hands autograd a tensor of the
    weight's shape instead: one for each shape. cuBLAS has working space for each stream of grouped products.
    ``dense``, ``experts``: whether the rank has layers without and with experts.
    """
    hidden, tensor, shapes = model.hidden, layout.tensor, set(_attention_weights(model, layout.tensor))
    if dense:
        shapes |= {(2 * model.ffn // tensor, hidden), (hidden, model.ffn // tensor)}
    if experts and model.experts is not None:
        own, shared = model.experts.ffn // layout.expert_tensor, model.experts.shared_ffn // tensor
        shapes |= {(2 * own, hidden), (hidden, own), (2 * shared, hidden), (hidden, shared)}
    spaces = 1 + _STREAMS * experts
    return _BF16 * sum(rows * columns for rows, columns in shapes) + spaces * _WORKSPACE


def _attention_weights(model: ModelShape, tensor: int) -> list[tuple[int, int]]:
    """Return the shapes of the weights of attention on a rank."""
    shape, hidden = model.attention, model.hidden
    if isinstance(shape, GqaShape):
        width = model.heads * shape.head // tensor
        return [(width + 2 * shape.kv_heads * shape.head // tensor, hidden), (hidden, width)]
    heads = model.heads // tensor
    query = heads * (shape.nope + shape.rope)
    queries = [(shape.q_rank, hidden), (query, shape.q_rank)] if shape.q_rank else [(query, hidden)]
    keys = [(shape.kv_rank + shape.rope, hidden), (heads * (shape.nope + shape.value), shape.kv_rank)]
    return [*queries, *keys, (hidden, heads * shape.value)]


def _gated(ffn: int, product: float) -> int:
    """Return the bytes of gate and up, and of their product, which the last projection reads."""
    return int((2 * _BF16 + product) * ffn)


def _attention(model: ModelShape, product: float) -> int:
    """Return the bytes of queries, keys, values and output, after the rotary embedding."""
    shape = model.attention
    sums = _FP32 * model.heads  # of the softmax
    if isinstance(shape, GqaShape):
        rotated = shape.head * (model.heads + shape.kv_heads)
        tensors = 2 * shape.head * (model.heads + shape.kv_heads)
        # The norms of queries and keys keep what they read.
        return _BF16 * (tensors + rotated * shape.norms) + sums
    compressed = int((_BF16 + product) * ((shape.q_rank or 0) + shape.kv_rank))
    each = 2 * (shape.nope + shape.rope) + 2 * shape.value
    return compressed + _BF16 * (shape.rope + model.heads * each) + sums
