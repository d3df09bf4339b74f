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
    weights = _weights(model, engine)
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


def _weights(model: ModelShape, engine: EngineShape) -> int:
    """Return the bytes of weights: experts split over all GPUs, attention and vocabulary within a replica."""
    total = parameters.total(model)
    attention = model.layers * parameters.attention(model).split
    ends = (parameters.embedding(model) + parameters.head(model)).split
    feed_forward = total.split - attention - ends
    eight = total.expert // engine.tensor
    eight += attention // engine.attention_tensor + feed_forward // engine.dense_tensor
    rest = ends // engine.attention_tensor + total.whole
    return eight * (1 if engine.fp8 else _BF16) + rest * _BF16
