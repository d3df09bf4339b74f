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
    attention = model.layers * parameters.attention(model).split
    embedding, head = parameters.embedding(model).split, parameters.head(model).split
    shared = 0
    if model.experts is not None:
        shared = 3 * model.hidden * model.experts.shared_ffn * (model.layers - model.experts.first_dense)
    dense = total.split - attention - embedding - head - shared
    each = 1 if engine.fp8 else _BF16
    matrices = attention // engine.attention_tensor + dense // engine.dense_tensor
    matrices += shared // engine.shared_tensor
    ends = embedding // engine.attention_tensor + head // engine.head_tensor
    return EngineWeights(total.expert // engine.tensor * each, matrices * each + (ends + total.whole) * _BF16)
