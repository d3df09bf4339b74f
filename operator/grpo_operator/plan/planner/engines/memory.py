"""Memory of an engine's GPUs: weights and KV cache (pure)."""

from dataclasses import dataclass

from grpo_operator.plan.planner.engines.shape import EngineShape
from grpo_operator.plan.planner.model import parameters
from grpo_operator.plan.planner.model.shape import GqaShape, ModelShape

_BF16, _FP32 = 2, 4
_FP32_ROUTERS = ("glm4_moe",)  # model types whose routers SGLang keeps in fp32


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
    """Return the KV cache bytes of one token on one GPU. MLA keeps it whole on each GPU of a replica.

    The layer that drafts has a cache of its own, for as many tokens.
    """
    shape, layers = model.attention, model.layers + engine.drafts
    if isinstance(shape, GqaShape):
        heads = max(shape.kv_heads // engine.attention_tensor, 1)
        return layers * 2 * heads * shape.head * _BF16
    return layers * (shape.kv_rank + shape.rope) * _BF16


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
    draft = _draft_weights(model, engine) if engine.drafts else EngineWeights(0, 0)
    return EngineWeights(
        total.expert // engine.tensor * each + draft.experts,
        matrices * each + (ends + total.whole - down) * _BF16 + _fp32_routers(model) + draft.rest,
    )


def _draft_weights(model: ModelShape, engine: EngineShape) -> EngineWeights:
    """Return the bytes of the layer that drafts on one GPU.

    It uses the model's embedding and output projection. The projection of two hidden states to one is whole
    on each GPU, in bf16.
    """
    assert model.experts is not None  # the engine's rules refuse models without such a layer
    each = 1 if engine.fp8 else _BF16
    layer, around = parameters.layer(model, model.layers), parameters.mtp_projection(model)
    down = _down_projections(model) // model.layers
    shared = 3 * model.hidden * model.experts.shared_ffn // engine.shared_tensor
    matrices = _attention(model, engine) + down + shared
    whole = layer.whole - down + around.total
    return EngineWeights(layer.expert // engine.tensor * each, matrices * each + whole * _BF16)


def _attention(model: ModelShape, engine: EngineShape) -> int:
    """Return the split parameters of an attention block on one GPU; too few key heads are copied."""
    count, shape, size = parameters.attention(model).split, model.attention, engine.attention_tensor
    if not isinstance(shape, GqaShape):
        return count // size
    keys = 2 * (model.hidden + shape.biases) * shape.head * shape.kv_heads
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


def _fp32_routers(model: ModelShape) -> int:
    """Return the bytes of the routers that they have beyond bf16."""
    if model.experts is None or model.model_type not in _FP32_ROUTERS:
        return 0
    routers = (model.layers - model.experts.first_dense) * model.hidden * model.experts.count
    return routers * (_FP32 - _BF16)
