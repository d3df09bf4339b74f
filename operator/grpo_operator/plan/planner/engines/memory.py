"""Memory of an engine's GPUs: weights and KV cache (pure)."""

from dataclasses import dataclass

from grpo_operator.plan.planner.engines.shape import EngineShape
from grpo_operator.plan.planner.model import parameters
from grpo_operator.plan.planner.model.shape import GqaShape, ModelShape

_BF16 = 2


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Bytes and tokens of one GPU.

    ``kv_tokens``: tokens that fit in the KV cache of one attention replica. ``wanted_tokens``: tokens of its
    share of maxRunningRequests at full length.
    """

    weights: int
    kv_per_token: int
    kv_tokens: int
    wanted_tokens: int

    @property
    def kv_cache(self) -> int:
        """Return the bytes of the KV cache."""
        return self.kv_tokens * self.kv_per_token


def engine_memory(
    model: ModelShape, engine: EngineShape, *, memory: int, fraction: float, context: int, requests: int
) -> EngineMemory:
    """Return the memory of one GPU with ``memory`` bytes, of which ``fraction`` is for weights and cache.

    ``context``: tokens of the longest sequence. ``requests``: concurrent sequences of the engine.
    """
    weights = engine_weights(model, engine).total
    each = kv_bytes_per_token(model, engine)
    cache = max(int(memory * fraction) - weights, 0)
    wanted = -(-requests // engine.attention_data) * context
    return EngineMemory(weights, each, cache // each, wanted)


def kv_bytes_per_token(model: ModelShape, engine: EngineShape) -> int:
    """Return the KV cache bytes of one token on one GPU. MLA keeps it whole on each GPU of a replica."""
    shape = model.attention
    if isinstance(shape, GqaShape):
        heads = max(shape.kv_heads // engine.attention_tensor, 1)
        return model.layers * 2 * heads * shape.head * _BF16
    return model.layers * (shape.kv_rank + shape.rope) * _BF16


@dataclass(frozen=True, slots=True)
class EngineWeights:
    """Bytes of weights on one GPU. ``experts``: routed experts. ``rest``: everything else."""

    experts: int
    rest: int

    @property
    def total(self) -> int:
        return self.experts + self.rest


def engine_weights(model: ModelShape, engine: EngineShape) -> EngineWeights:
    """Return the bytes on one GPU.

    Experts are split over all GPUs, attention within a replica, dense feed-forwards and shared experts as the
    engine's rules say. Embedding and output projection are split over all GPUs, or with ``dp_lm_head``
    within a replica; with several replicas the embedding is whole within each.
    """
    total = parameters.total(model)
    embedding, head = parameters.embedding(model).split, parameters.head(model).split
    attention, shared = model.layers * parameters.attention(model).split, _shared_experts(model)
    dense = total.split - attention - embedding - head - shared
    down = _down_projections(model)
    matrices = model.layers * _attention(model, engine) + down
    matrices += dense // engine.dense_tensor + shared // engine.shared_tensor
    each = 1 if engine.fp8 else _BF16
    ends = embedding // engine.attention_tensor + head // engine.head_tensor
    return EngineWeights(
        total.expert // engine.tensor * each, matrices * each + (ends + total.whole - down) * _BF16
    )


def _attention(model: ModelShape, engine: EngineShape) -> int:
    """Return the split parameters of an attention block on one GPU; too few key heads are copied."""
    count, shape, size = parameters.attention(model).split, model.attention, engine.attention_tensor
    if not isinstance(shape, GqaShape):
        return count // size
    keys = 2 * model.hidden * shape.head * shape.kv_heads
    return (count - keys) // size + keys // min(size, shape.kv_heads)


def _down_projections(model: ModelShape) -> int:
    """Return the parameters of MLA's down projections, which every GPU holds."""
    shape = model.attention
    if isinstance(shape, GqaShape):
        return 0
    return model.layers * model.hidden * ((shape.q_rank or 0) + shape.kv_rank + shape.rope)


def _shared_experts(model: ModelShape) -> int:
    if model.experts is None:
        return 0
    return 3 * model.hidden * model.experts.shared_ffn * (model.layers - model.experts.first_dense)
