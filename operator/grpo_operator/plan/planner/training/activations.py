"""Bytes of activations that one micro-batch keeps for its backward pass (pure).

Counted per token from what each operation of a bf16 layer saves, with flash attention (no score
matrix) and sequence parallelism wherever tensor > 1. Compared with measured peaks in
benchmarks/results/planner.json, and what each module's recomputation drops with what Megatron-Core saves
(tests/worker/test_recompute.py).
"""

from dataclasses import dataclass

from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.api.v1alpha1.offload import OffloadModule
from grpo_operator.api.v1alpha1.recompute import FULL, Recompute, RecomputeKind, RecomputeModule
from grpo_operator.plan.planner.model.shape import GqaShape, MlaShape, ModelShape
from grpo_operator.plan.planner.training.fused_activations import (
    LayerBytes,
    layer_bytes,
    recomputed_bytes,
)
from grpo_operator.plan.planner.training.offloaded import UNDERWAY, offloaded

_BF16, _FP32 = 2, 4
# Copies of a layer's keys and values that context-parallel ranks hold at the peak: the next part, the
# received one, and their gradients (one case: 128 k tokens on two GPUs, benchmarks/results/context_gpu.json,
# which Transformer Engine computed and is planned 5.5 % too low).
_EXCHANGED = 6


@dataclass(frozen=True, slots=True)
class Workload:
    """One optimizer step of a rank. ``sequence``: tokens of a sequence, prompt and response.

    ``log_prob_tokens``: of a micro-batch in passes without gradients; None: those of the update.
    ``offloaded``: modules whose activations wait in host memory.
    ``overlap``: a forward pass runs beside the backward pass of an earlier micro-batch.
    ``fused``: Transformer Engine computes the layers. ``fp8``: it multiplies in FP8.
    """

    sequence: int
    micro_batch: int = 1
    micro_batches: int = 1
    recompute: Recompute = FULL
    log_prob_tokens: int | None = None
    offloaded: tuple[OffloadModule, ...] = ()
    overlap: bool = False
    fused: bool = False
    fp8: bool = False

    def tokens(self, layout: Layout) -> int:
        """Return the tokens of a micro-batch on one rank, before sequence parallelism."""
        return -(-self.sequence * self.micro_batch // layout.context)


@dataclass(frozen=True, slots=True)
class LayerActivations:
    """Bytes kept until the backward pass, and additional bytes during the layer's own backward pass.

    ``copied``: bytes that wait in host memory.
    """

    kept: int
    working: int
    copied: int = 0


def layer_activations(
    model: ModelShape, layout: Layout, workload: Workload, layer: int, place: int = 0
) -> LayerActivations:
    """Return the activations of one layer on one rank. ``place``: of the layer in its model chunk."""
    # The residual stream and the norms' inputs are split over the tensor-parallel ranks too.
    each = workload.tokens(layout), layout.tensor
    stream = _bytes(_BF16 * model.hidden, *each)
    layer_of_kernels = layer_bytes(model, layer, workload.fp8) if workload.fused else _of_local(model, layer)
    whole, passing = (_bytes(part, *each) for part in (layer_of_kernels.kept, layer_of_kernels.passing))
    recompute = workload.recompute.of_layer(place)
    exchanged = _bytes(_EXCHANGED * _keys_and_values(model), *each) if layout.context > 1 else 0
    if recompute.kind is RecomputeKind.FULL:
        return LayerActivations(stream, whole + passing + exchanged)
    dropped = (
        recomputed_bytes(model, layer, recompute.modules, workload.fp8)
        if workload.fused
        else _recomputed(model, layer, recompute)
    )
    halves = [_bytes(half, *each) for half in dropped]
    away = offloaded(model, workload.offloaded, layer, *each)
    # The backward pass reaches the attention when it has released the feed-forward.
    working = max(stream + max(halves), passing) + exchanged + UNDERWAY * away.leaving
    return LayerActivations(whole - sum(halves) - away.leaving, working, away.copied)


def _of_local(model: ModelShape, layer: int) -> LayerBytes:
    """Return what a layer of Megatron-Core's own kernels keeps without recomputation."""
    return LayerBytes(4 * _BF16 * model.hidden, _attention(model), _feed_forward(model, layer))


def _bytes(of_token: int, tokens: int, ranks: int) -> int:
    return tokens * of_token // ranks


def _recomputed(model: ModelShape, layer: int, recompute: Recompute) -> tuple[int, int]:
    """Return bytes per token that attention and feed-forward do not keep, because they compute them again.

    Flash attention saves its output, which the projection after it needs, and no scores: recomputing
    core_attn drops nothing else.
    """
    shape, experts, modules = model.attention, model.experts, recompute.modules
    attention = feed_forward = 0
    if RecomputeModule.LAYERNORM in modules:
        attention = feed_forward = _BF16 * model.hidden
    if RecomputeModule.MLA_UP_PROJ in modules and isinstance(shape, MlaShape):
        attention += _BF16 * _up_projected(model, shape)
    if experts is None or layer < experts.first_dense:
        return attention, feed_forward + _feed_forward(model, layer) * (RecomputeModule.MLP in modules)
    parts = {
        RecomputeModule.MOE: _feed_forward(model, layer),
        RecomputeModule.MOE_ACT: _BF16 * experts.top_k * experts.ffn,
        RecomputeModule.SHARED_EXPERTS: _BF16 * 3 * experts.shared_ffn,
    }
    return attention, feed_forward + sum(parts.get(module, 0) for module in modules)


def _attention(model: ModelShape) -> int:
    """Return bytes per token: inputs of the projections, queries, keys, values, output."""
    shape = model.attention
    if isinstance(shape, GqaShape):
        width = shape.head * (model.heads + 2 * shape.kv_heads)
        return _BF16 * (2 * width + shape.head * model.heads)
    compressed = 2 * ((shape.q_rank or 0) + shape.kv_rank) + shape.rope
    return _BF16 * (compressed + _up_projected(model, shape) + model.heads * shape.value)


def _keys_and_values(model: ModelShape) -> int:
    """Return bytes per token."""
    shape = model.attention
    if isinstance(shape, GqaShape):
        return _BF16 * 2 * shape.head * shape.kv_heads
    return _BF16 * model.heads * (shape.nope + shape.rope + shape.value)


def _up_projected(model: ModelShape, shape: MlaShape) -> int:
    """Return the values per token that the up projections and the rotary embedding compute."""
    query_key = 2 * model.heads * (shape.nope + shape.rope)
    # Queries and keys twice: before and after the rotary part is concatenated.
    return 2 * query_key + model.heads * (shape.value + shape.nope)


def _feed_forward(model: ModelShape, layer: int) -> int:
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
