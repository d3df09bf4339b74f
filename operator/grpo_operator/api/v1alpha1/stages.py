"""Assigns layers to pipeline stages and their chunks (pure)."""

from functools import cache

from grpo_operator.api.v1alpha1.layout import Layout


def stage_counts(layers: int, layout: Layout) -> tuple[int, ...]:
    """Return the number of layers of each stage.

    Raises ValueError with the fields to change when the model cannot be split this way.
    """
    counts = chunk_counts(layers, layout)
    return tuple(sum(counts[stage :: layout.pipeline]) for stage in range(layout.pipeline))


@cache
def chunk_counts(layers: int, layout: Layout) -> tuple[int, ...]:
    """Return the number of layers of each model chunk, in the order in which a micro-batch passes them.

    Chunk i is on stage i modulo pipeline. Raises ValueError as ``stage_counts`` does.
    """
    chunks = layout.virtual_pipeline
    if chunks == 1:
        return _equal_stages(layers, layout)
    if layout.pipeline == 1:
        raise ValueError(f"virtualPipeline={chunks} needs pipeline > 1: set virtualPipeline to 1")
    if layout.layers_in_first_stage is None and layout.layers_in_last_stage is None:
        return _balanced_chunks(layers, layout)
    stages = _equal_stages(layers, layout)
    odd = [count for count in stages if count % chunks]
    if odd:
        raise ValueError(
            f"virtualPipeline={chunks}: a stage of {odd[0]} layers cannot be split into {chunks} equal "
            "chunks: remove layersInFirstStage and layersInLastStage, so that chunks may differ"
        )
    return tuple(count // chunks for count in stages) * chunks


def evenly_split(layers: int, layout: Layout) -> bool:
    """Return whether Megatron-Core finds the layers of each chunk by itself."""
    return layout.virtual_pipeline == 1 or layers % (layout.pipeline * layout.virtual_pipeline) == 0


def _equal_stages(layers: int, layout: Layout) -> tuple[int, ...]:
    """Return the layers of each stage: equal, but for the first and last where the layout says so."""
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
    return tuple(counts)


def _balanced_chunks(layers: int, layout: Layout) -> tuple[int, ...]:
    """Return chunks that differ by one layer at most.

    The first stage also has the embedding and the last one the logits, so they get a further layer last, and
    their outermost chunks last of all.
    """
    pipeline, count = layout.pipeline, layout.pipeline * layout.virtual_pipeline
    if layers < count:
        raise ValueError(
            f"virtualPipeline={layout.virtual_pipeline}: {layers} layers are fewer than the "
            f"{count} chunks of {pipeline} stages: use a smaller virtualPipeline or pipeline"
        )
    each, further = divmod(layers, count)
    counts = [each] * count
    stages = [*range(1, pipeline - 1), 0, pipeline - 1]
    for number in range(further):
        stage = stages[number % pipeline]
        chunks = list(range(stage, count, pipeline))
        chunks.sort(key=lambda chunk: chunk in (0, count - 1))  # keeps the order of the others
        counts[chunks[number // pipeline]] += 1
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


def stage_layers(layers: int, layout: Layout) -> tuple[tuple[int, ...], ...]:
    """Return the layer indices of each stage; with an interleaved schedule its chunks are not contiguous."""
    stages: list[list[int]] = [[] for _ in range(layout.pipeline)]
    start = 0
    for chunk, count in enumerate(chunk_counts(layers, layout)):
        stages[chunk % layout.pipeline] += range(start, start + count)
        start += count
    return tuple(tuple(stage) for stage in stages)
