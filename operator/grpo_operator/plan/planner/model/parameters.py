"""Parameter counts, split by how Megatron-Core shards them (pure).

Verified against DeepSeek-V3's published total of 671.026 B parameters and, weight by weight,
against Megatron-Core itself (tests/worker/test_planner.py).
"""

from dataclasses import dataclass

from grpo_operator.plan.planner.model.shape import ExpertShape, GqaShape, MlaShape, ModelShape


@dataclass(frozen=True, slots=True)
class Count:
    """Numbers of parameters. ``split``: split over tensor-parallel ranks; ``whole``: replicated on them;
    ``expert``: split over expert-parallel (and expert-tensor-parallel) ranks.
    """

    split: int = 0
    whole: int = 0
    expert: int = 0

    def __add__(self, other: "Count") -> "Count":
        return Count(self.split + other.split, self.whole + other.whole, self.expert + other.expert)

    def __mul__(self, times: int) -> "Count":
        return Count(self.split * times, self.whole * times, self.expert * times)

    @property
    def total(self) -> int:
        return self.split + self.whole + self.expert


def attention(model: ModelShape) -> Count:
    """Return the parameters of one attention block with its inner norms."""
    shape = model.attention
    return _mla(model, shape) if isinstance(shape, MlaShape) else _gqa(model, shape)


def _mla(model: ModelShape, shape: MlaShape) -> Count:
    head = shape.nope + shape.rope
    if shape.q_rank is None:
        query = Count(split=model.hidden * model.heads * head)
    else:  # the down projections are replicated on every tensor-parallel rank
        query = Count(shape.q_rank * model.heads * head, model.hidden * shape.q_rank + shape.q_rank)
    down = Count(whole=model.hidden * (shape.kv_rank + shape.rope) + shape.kv_rank)
    up = Count(split=shape.kv_rank * model.heads * (shape.nope + shape.value))
    return query + down + up + Count(split=model.heads * shape.value * model.hidden)


def _gqa(model: ModelShape, shape: GqaShape) -> Count:
    projections = model.hidden * shape.head * (model.heads + 2 * shape.kv_heads) + _biases(model)
    return Count(projections + model.heads * shape.head * model.hidden, _inner_norms(model))


def feed_forward(model: ModelShape, layer: int) -> Count:
    """Return the parameters of one layer's feed-forward: dense, or router, shared and routed experts."""
    experts = model.experts
    if experts is None or layer < experts.first_dense:
        return Count(split=3 * model.hidden * model.ffn)
    return _mixture(model, experts)


def _mixture(model: ModelShape, experts: ExpertShape) -> Count:
    routed = experts.count * 3 * model.hidden * experts.ffn
    return Count(3 * model.hidden * experts.shared_ffn, model.hidden * experts.count, routed)


def layer(model: ModelShape, index: int) -> Count:
    """Return the parameters of one decoder layer with its two norms."""
    return attention(model) + feed_forward(model, index) + Count(whole=2 * model.hidden)


def embedding(model: ModelShape) -> Count:
    """Return the parameters of the token embedding."""
    return Count(split=model.vocabulary * model.hidden)


def head(model: ModelShape) -> Count:
    """Return the parameters of the final norm and, unless tied to the embedding, the output projection."""
    return Count(0 if model.tied else model.vocabulary * model.hidden, model.hidden)


def mtp_layer(model: ModelShape) -> Count:
    """Return the parameters of the multi-token-prediction layer.

    It is one more layer and what is around it; embedding and output projection are those of the model.
    """
    return layer(model, model.layers) + mtp_projection(model)


def mtp_projection(model: ModelShape) -> Count:
    """Return the parameters around the multi-token-prediction layer.

    They are a projection of two hidden states to one, and three norms.
    """
    return Count(split=2 * model.hidden * model.hidden, whole=3 * model.hidden)


def total(model: ModelShape, mtp: bool = False) -> Count:
    """Return the parameters of the whole model. ``mtp``: with the multi-token-prediction layer."""
    count = embedding(model) + head(model) + (mtp_layer(model) if mtp else Count())
    for index in range(model.layers):
        count += layer(model, index)
    return count


def hf_tensors(model: ModelShape, fp8: bool = False, mtp: bool = False) -> int:
    """Return the number of tensors of the model in Hugging Face's format.

    ``fp8``: matrices have scales. ``mtp``: with the multi-token-prediction layer.
    """
    mla, layers = isinstance(model.attention, MlaShape), model.layers + mtp
    matrices, others = (5, 4) if mla else (4, 2)  # of attention, and the norms of the layer and inside it
    if isinstance(model.attention, GqaShape):
        others += 2 * model.attention.norms + 3 * model.attention.biases
    experts = 0 if model.experts is None else layers - model.experts.first_dense
    each = 0 if model.experts is None else 3 * (model.experts.count + bool(model.experts.shared_ffn))
    projections = layers * matrices + experts * each + 3 * (layers - experts)
    routers = 0 if model.experts is None else experts * (1 + model.experts.biases)
    ends = 2 + (not model.tied) + 4 * mtp  # a projection in bf16 and three norms around the layer
    return projections * (2 if fp8 else 1) + layers * others + routers + ends


def fp8_parameters(model: ModelShape, mtp: bool = False) -> int:
    """Return the number of parameters that DeepSeek's FP8 format stores in 8 bits.

    These are the matrices of the layers, without embedding, output projection, router, norms and biases.
    ``mtp``: with those of the multi-token-prediction layer, whose projection of two hidden states is not
    among them.
    """
    experts = model.experts
    count = 0
    for index in range(model.layers + mtp):
        part = layer(model, index)
        count += part.total - 2 * model.hidden - _inner_norms(model) - _biases(model)
        if experts is not None and index >= experts.first_dense:
            count -= model.hidden * experts.count
    return count


def _inner_norms(model: ModelShape) -> int:
    shape = model.attention
    if isinstance(shape, GqaShape):
        return 2 * shape.head * shape.norms
    return (shape.q_rank or 0) + shape.kv_rank


def _biases(model: ModelShape) -> int:
    """Return the biases of one layer's queries, keys and values."""
    shape = model.attention
    if isinstance(shape, GqaShape) and shape.biases:
        return shape.head * (model.heads + 2 * shape.kv_heads)
    return 0


def model_bytes(model: ModelShape, fp8: bool = False, mtp: bool = False) -> int:
    """Return the bytes of the weights in bf16, or in FP8 with one fp32 scale per 128 x 128 block.

    ``mtp``: with the multi-token-prediction layer, as trainers publish them that train it.
    """
    parameters = total(model, mtp).total
    if not fp8:
        return 2 * parameters
    eight = fp8_parameters(model, mtp)
    return eight + 4 * eight // (128 * 128) + 2 * (parameters - eight)
