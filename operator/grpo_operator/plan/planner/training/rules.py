"""Rules of Megatron-Core 0.16 and of block-wise FP8 for a layout (pure).

Every function returns messages with field, value and remedy, and no message when the layout is valid.
"""

from collections.abc import Iterator
from dataclasses import replace

from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.api.v1alpha1.stages import stage_counts
from grpo_operator.plan.planner.model.shape import GqaShape, ModelShape

FP8_BLOCK = 128  # rows and columns that share one scale in DeepSeek's FP8 format


def problems(model: ModelShape, layout: Layout) -> list[str]:
    """Return why Megatron-Core cannot run ``model`` in ``layout``."""
    messages = [*_dense(model, layout), *_experts(model, layout)]
    try:
        stage_counts(model.layers, layout)
    except ValueError as error:
        messages.append(f"parallelism.{error}")
    return messages


def _indivisible(field: str, size: int, what: str, amount: int) -> Iterator[str]:
    if amount % size:
        yield (
            f"parallelism.{field}={size}: {what} ({amount}) is not divisible by it: use a divisor of {amount}"
        )


def _dense(model: ModelShape, layout: Layout) -> Iterator[str]:
    size = layout.tensor
    yield from _indivisible("tensor", size, "attention heads", model.heads)
    yield from _indivisible("tensor", size, "the vocabulary", model.vocabulary)
    yield from _indivisible("tensor", size, "the dense feed-forward width", model.ffn)
    shape = model.attention
    if isinstance(shape, GqaShape):
        yield from _indivisible("tensor", size, "key-value heads", shape.kv_heads)


def _experts(model: ModelShape, layout: Layout) -> Iterator[str]:
    experts = model.experts
    if experts is None:
        if layout.expert > 1:
            text = f"a {model.model_type} model has no experts: use expert=1"
            yield f"parallelism.expert={layout.expert}: {text}"
        return
    yield from _indivisible("expert", layout.expert, "the number of experts", experts.count)
    yield from _indivisible("expertTensor", layout.expert_tensor, "the width of an expert", experts.ffn)
    yield from _indivisible("tensor", layout.tensor, "the width of the shared experts", experts.shared_ffn)
    if layout.tensor > 1 and layout.expert == 1 and layout.expert_tensor != layout.tensor:
        # Megatron-Core would not reduce the experts' gradients over the tensor-parallel ranks.
        yield (
            f"parallelism.expertTensor={layout.expert_tensor}: with tensor={layout.tensor} and "
            "expert=1 it must equal tensor: set expertTensor to tensor, or expert above 1"
        )


def batch_problems(
    layout: Layout, sequences: int, micro_batch: int, field: str = "microBatchSizePerGpu"
) -> list[str]:
    """Return why ``sequences`` of one optimizer step cannot be divided into micro-batches.

    ``field``: of the trainer, which has ``micro_batch``.
    """
    each = layout.data * micro_batch
    if sequences % each:
        return [
            f"miniBatchSize x samplesPerPrompt = {sequences} sequences is not a multiple of data-parallel "
            f"size {layout.data} x {field} {micro_batch} = {each}: change one of them"
        ]
    count = sequences // each
    if layout.virtual_pipeline > 1 and count % layout.pipeline > 0:
        return [
            f"parallelism.virtualPipeline={layout.virtual_pipeline}: {count} micro-batches are not a "
            f"multiple of pipeline {layout.pipeline}: change miniBatchSize or {field}"
        ]
    return []


def packing_problems(layout: Layout, sequences: int) -> list[str]:
    """Return why ``sequences`` of one optimizer step cannot be packed."""
    return batch_problems(replace(layout, virtual_pipeline=1), sequences, 1)


def fp8_problems(model: ModelShape, layout: Layout) -> list[str]:
    """Return where a shard boundary would cut through a 128 x 128 block.

    Quantising such a shard would give other values than quantising the whole matrix.
    """
    cuts = [
        ("tensor", layout.tensor, "the dense feed-forward width", model.ffn),
        *(("tensor", layout.tensor, what, size) for what, size in _attention_widths(model)),
    ]
    if model.experts is not None:
        cuts += [
            ("expertTensor", layout.expert_tensor, "the width of an expert", model.experts.ffn),
            ("tensor", layout.tensor, "the width of the shared experts", model.experts.shared_ffn),
        ]
    return [
        f"parallelism.{field}={size}: {what} ({width}) over {size} ranks is not a multiple of the FP8 block "
        f"of {FP8_BLOCK}: use a smaller {field}, or engines without quantization"
        for field, size, what, width in cuts
        if size > 1 and width % (size * FP8_BLOCK)
    ]


def _attention_widths(model: ModelShape) -> Iterator[tuple[str, int]]:
    shape = model.attention
    if isinstance(shape, GqaShape):
        yield "the width of all query heads", model.heads * shape.head
        yield "the width of all key heads", shape.kv_heads * shape.head
    else:
        yield "the width of all query heads", model.heads * (shape.nope + shape.rope)
        yield "the width of all key and value heads", model.heads * (shape.nope + shape.value)
        yield "the width of all value heads", model.heads * shape.value
