"""Assigns layers to pipeline stages by Megatron-Core's rules (pure)."""

from grpo_operator.api.v1alpha1.layout import Layout


def stage_counts(layers: int, layout: Layout) -> tuple[int, ...]:
    """Return the number of layers of each stage.

    Raises ValueError with the fields to change when Megatron-Core cannot split the model this way.
    """
    first, last = layout.layers_in_first_stage, layout.layers_in_last_stage
    if layout.pipeline == 1 and (first is not None or last is not None):
        raise ValueError("layersInFirstStage and layersInLastStage need pipeline > 1: remove them")
    fixed = (first is not None) + (last is not None)
    middle, rest = layout.pipeline - fixed, layers - (first or 0) - (last or 0)
    if rest < 0 or bool(rest) != bool(middle) or (middle and rest % middle):
        raise ValueError(
            f"pipeline={layout.pipeline}: {layers} layers"
            + (f", without the {layers - rest} of the first and last stage," if fixed else "")
            + f" cannot be split into {middle} equal stages: {_remedy(layers, layout.pipeline)}"
        )
    each = rest // middle if middle else 0
    counts = [each] * layout.pipeline
    if first is not None:
        counts[0] = first
    if last is not None:
        counts[-1] = last
    _check_chunks(counts, layout)
    return tuple(counts)


def _remedy(layers: int, pipeline: int) -> str:
    split = uneven(layers, pipeline)
    if split is None:
        return f"use a smaller pipeline than {layers} stages"
    return f"use a divisor of {layers}, or layersInFirstStage={split[0]} and layersInLastStage={split[1]}"


def uneven(layers: int, pipeline: int) -> tuple[int, int] | None:
    """Return (first, last) layers for equal middle stages and the smallest possible largest stage, or None.

    The last stage also computes the logits, so it gets fewer layers than the first.
    """
    if pipeline < 2 or layers < pipeline:
        return None
    each = -(-layers // pipeline)
    ends = layers - (pipeline - 2) * each
    while ends < 2:  # too few layers are left for the first and last stage
        each -= 1
        ends = layers - (pipeline - 2) * each
    return ends - ends // 2, ends // 2


def _check_chunks(counts: list[int], layout: Layout) -> None:
    chunks = layout.virtual_pipeline
    if chunks == 1:
        return
    if layout.pipeline == 1:
        raise ValueError(f"virtualPipeline={chunks} needs pipeline > 1: set virtualPipeline to 1")
    odd = [count for count in counts if count % chunks]
    if odd:
        raise ValueError(
            f"virtualPipeline={chunks}: a stage of {odd[0]} layers cannot be split into {chunks} chunks: "
            "use a divisor of every stage's layers"
        )


def stage_layers(layers: int, layout: Layout) -> tuple[tuple[int, ...], ...]:
    """Return the layer indices of each stage; with an interleaved schedule its chunks are not contiguous."""
    chunks = [count // layout.virtual_pipeline for count in stage_counts(layers, layout)]
    stages: list[list[int]] = [[] for _ in chunks]
    start = 0
    for _ in range(layout.virtual_pipeline):
        for stage, count in enumerate(chunks):
            stages[stage] += range(start, start + count)
            start += count
    return tuple(tuple(stage) for stage in stages)
