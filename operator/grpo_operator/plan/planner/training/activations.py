"""Bytes of activations that one micro-batch keeps for its backward pass (pure).

Counted per token from what each operation of a bf16 layer saves, with flash attention (no score
matrix) and sequence parallelism wherever tensor > 1. Compared with measured peaks in
benchmarks/results/planner.json.
"""

from dataclasses import dataclass

from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.plan.planner.model.shape import GqaShape, MlaShape, ModelShape

_BF16, _FP32 = 2, 4


@dataclass(frozen=True, slots=True)
class Workload:
    """One optimizer step of a rank. ``sequence``: tokens of a sequence, prompt and response.

    ``recompute``: keep only each layer's input and compute the layer again in the backward pass.
    ``log_prob_tokens``: of a micro-batch in passes without gradients; None: those of the update.
    """

    sequence: int
    micro_batch: int = 1
    micro_batches: int = 1
    recompute: bool = True
    log_prob_tokens: int | None = None

    def tokens(self, layout: Layout) -> int:
        """Return the tokens of a micro-batch on one rank, before sequence parallelism."""
        return -(-self.sequence * self.micro_batch // layout.context)


@dataclass(frozen=True, slots=True)
class LayerActivations:
    """Bytes kept until the backward pass, and additional bytes during the layer's own backward pass."""

    kept: int
    working: int


def layer_activations(model: ModelShape, layout: Layout, workload: Workload, layer: int) -> LayerActivations:
    """Return the activations of one layer on one rank."""
    tokens = workload.tokens(layout)
    # The residual stream and the norms' inputs are split over the tensor-parallel ranks too.
    stream = tokens * model.hidden * _BF16 // layout.tensor
    inside = tokens * (_attention(model) + _feed_forward(model, layout, layer)) // layout.tensor
    whole = 4 * stream + inside
    if workload.recompute:
        return LayerActivations(stream, whole)
    return LayerActivations(whole, stream)


def _attention(model: ModelShape) -> int:
    """Return bytes per token: inputs of the projections, queries, keys, values, output."""
    shape = model.attention
    if isinstance(shape, GqaShape):
        width = shape.head * (model.heads + 2 * shape.kv_heads)
        return _BF16 * (2 * width + shape.head * model.heads)
    return _BF16 * _mla(model, shape)


def _mla(model: ModelShape, shape: MlaShape) -> int:
    compressed = 2 * ((shape.q_rank or 0) + shape.kv_rank) + shape.rope
    query_key = 2 * model.heads * (shape.nope + shape.rope)
    # Queries and keys twice: before and after the rotary part is concatenated.
    return compressed + 2 * query_key + model.heads * (2 * shape.value + shape.nope)


def _feed_forward(model: ModelShape, layout: Layout, layer: int) -> int:
    """Return bytes per token. A gated feed-forward keeps gate, up and their product."""
    experts = model.experts
    if experts is None or layer < experts.first_dense:
        return _BF16 * 3 * model.ffn
    # Each token is routed top_k times: its copy, the expert's inner values, the expert's output.
    routed = experts.top_k * (2 * model.hidden + 3 * experts.ffn) * _BF16
    router = 3 * experts.count * _FP32
    return routed + router + 3 * experts.shared_ffn * _BF16


def logits_bytes(model: ModelShape, layout: Layout, workload: Workload) -> int:
    """Return the bytes of the last stage's logits, in bf16 and fp32; their gradient reuses the memory."""
    return workload.tokens(layout) * (model.vocabulary // layout.tensor) * (_BF16 + _FP32)
