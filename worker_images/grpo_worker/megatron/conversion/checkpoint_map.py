"""Mapping between the tensors of a checkpoint and Hugging Face tensors (pure).

A checkpoint keeps Megatron-Core's tensors as a whole, whatever the layout of the ranks that saved it. Experts
of a layer are one tensor, [experts, ...]. If all layers have the same tensors, those of one name are one too,
[layers, ...], or [layers, experts, ...].
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from grpo_worker.megatron.families.base import (
    EXPERT_PARTS,
    GLOBAL_NAMES,
    MTP_LAYER,
    MTP_NAMES,
    QKV,
    Family,
    Shapes,
    first_rows,
)

MTP_MARK = f"{MTP_LAYER}.eh_proj.weight"  # is in checkpoints with a multi-token prediction layer
EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
_VOCABULARY = frozenset((EMBEDDING, _OUTPUT))  # their rows may be padded
_MTP_INNER = f"{MTP_LAYER}.transformer_layer."  # with every version of Megatron-Core
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\..*")


@dataclass(frozen=True, slots=True)
class Part:
    """Hugging Face tensor within a stored one: ``rows`` (first, end) of it, one below the other."""

    name: str
    shape: tuple[int, ...]
    rows: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Megatron-Core's tensor of one layer or one expert, and the Hugging Face tensors that it holds.

    ``key``: of the checkpoint's tensor, whose first dimensions ``index`` selects. ``shape``: of the rest.
    ``padded``: the checkpoint's tensor may have more rows.
    """

    key: str
    index: tuple[int, ...]
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    padded: bool = False


def stored_tensors(hf: dict[str, Any], family: Family, keys: Collection[str]) -> Iterator[StoredTensor]:
    """Return where the policy's tensors are in a checkpoint.

    ``keys``: of the checkpoint's tensors; they tell whether it has the layer of multi-token prediction.
    """
    layers, shapes = hf["num_hidden_layers"], family.shapes(hf)
    for key, name in GLOBAL_NAMES.items():
        if name in shapes and key != _OUTPUT:
            yield _stored(key, (), {name: shapes[name]}, padded=key in _VOCABULARY)
    for layer in range(layers):
        for rest, expert, parts in _of_layer(hf, family, _below(shapes, layer)):
            own, shared = f"decoder.layers.{layer}.{rest}", f"decoder.layers.{rest}"
            key, index = (shared, (layer,)) if shared in keys else (own, ())
            yield _stored(key, index + expert, _within(layer, parts), _groups(hf, family, rest))
    if (head := GLOBAL_NAMES[_OUTPUT]) in shapes:
        yield _stored(_OUTPUT, (), {head: shapes[head]}, padded=True)
    if MTP_MARK in keys:
        yield from _of_mtp(hf, family, layers)


def _of_mtp(hf: dict[str, Any], family: Family, layer: int) -> Iterator[StoredTensor]:
    shapes = _below(family.mtp_shapes(hf), layer)
    for rest, name in MTP_NAMES.items():
        yield _stored(f"{MTP_LAYER}.{rest}", (), _within(layer, {name: shapes.pop(name)}))
    for rest, expert, parts in _of_layer(hf, family, shapes):
        yield _stored(_MTP_INNER + rest, expert, _within(layer, parts), _groups(hf, family, rest))


def _of_layer(
    hf: dict[str, Any], family: Family, shapes: Shapes
) -> Iterator[tuple[str, tuple[int, ...], Shapes]]:
    """Return (key below the layer, index of the expert, parts) of each tensor. ``shapes``: of the layer."""
    left = set(shapes)
    for rest, names in family.layer_names.items():
        if left.issuperset(names):
            left.difference_update(names)
            yield rest, (), {name: shapes[name] for name in names}
    for expert in sorted({int(found[1]) for name in left if (found := _EXPERT.fullmatch(name))}):
        for linear, suffixes in EXPERT_PARTS.items():
            names = tuple(f"mlp.experts.{expert}.{suffix}" for suffix in suffixes)
            left.difference_update(names)
            parts = {name: shapes[name] for name in names}
            yield f"mlp.experts.experts.{linear}.weight", (expert,), parts
    assert not left, f"{hf['model_type']}: no tensor of a checkpoint has {sorted(left)}"


def _stored(
    key: str, index: tuple[int, ...], parts: Shapes, groups: int = 1, padded: bool = False
) -> StoredTensor:
    widths = [shape[0] // groups for shape in parts.values()]
    cuts = tuple(
        Part(name, shape, tuple((first, first + width) for first in firsts))
        for (name, shape), width, firsts in zip(
            parts.items(), widths, first_rows(widths, groups), strict=True
        )
    )
    rest = next(iter(parts.values()))[1:]
    return StoredTensor(key, index, (groups * sum(widths), *rest), cuts, padded)


def _groups(hf: dict[str, Any], family: Family, rest: str) -> int:
    """Return how many times the parts of a tensor alternate."""
    return int(family.fields(hf)["num_query_groups"]) if rest.startswith(QKV) else 1


def _below(shapes: Mapping[str, tuple[int, ...]], layer: int) -> Shapes:
    prefix = f"model.layers.{layer}."
    return {name.removeprefix(prefix): shape for name, shape in shapes.items() if name.startswith(prefix)}


def _within(layer: int, shapes: Shapes) -> Shapes:
    return {f"model.layers.{layer}.{name}": shape for name, shape in shapes.items()}
