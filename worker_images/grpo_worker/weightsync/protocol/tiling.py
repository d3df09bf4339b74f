"""Tiling: check that the slices of all trainer ranks cover every tensor exactly once. Pure."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from grpo_worker.weightsync.protocol.manifest import Manifest, Slice


class PlanError(ValueError):
    """The trainer ranks' slices do not form whole tensors."""


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One whole tensor. ``pieces``: the (rank, slice) pairs that make it up, ordered by offset."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[tuple[int, Slice], ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """All tensors of a version. ``plan_id``: hash of the layout, equal for all versions of that layout."""

    version: int
    plan_id: str
    tensors: tuple[TensorPlan, ...]


def make_plan(manifests: Sequence[Manifest]) -> Plan:
    """Combine the manifests of all ranks into a plan.

    Raises PlanError if ranks are missing, versions differ, or a tensor has a gap or an overlap.
    """
    if not manifests:
        raise PlanError("no manifest was published")
    versions = {m.version for m in manifests}
    if len(versions) > 1:
        raise PlanError(f"manifests of different versions: {sorted(versions)}")
    world, ranks = manifests[0].world, sorted(m.rank for m in manifests)
    if ranks != list(range(world)):
        raise PlanError(f"manifests of ranks {ranks}, expected 0 to {world - 1}")
    pieces: dict[str, list[tuple[int, Slice]]] = defaultdict(list)
    for manifest in sorted(manifests, key=lambda m: m.rank):
        for part in manifest.slices:
            pieces[part.name].append((manifest.rank, part))
    tensors = tuple(_whole(name, parts) for name, parts in sorted(pieces.items()))
    return Plan(versions.pop(), _plan_id(manifests), tensors)


def _whole(name: str, parts: list[tuple[int, Slice]]) -> TensorPlan:
    ordered = sorted(parts, key=lambda item: item[1].offset)
    first = ordered[0][1]
    position = 0
    for rank, part in ordered:
        if (part.shape, part.dtype, part.dim) != (first.shape, first.dtype, first.dim):
            raise PlanError(f"{name}: ranks disagree on shape, dtype or split dimension")
        if part.offset != position:
            problem = "overlap" if part.offset < position else "gap"
            raise PlanError(f"{name}: {problem} at {position} along dim {part.dim} (rank {rank})")
        position += part.length
    if position != first.shape[first.dim]:
        raise PlanError(f"{name}: covers {position} of {first.shape[first.dim]} along dim {first.dim}")
    return TensorPlan(name, first.shape, first.dtype, tuple(ordered))


def _plan_id(manifests: Iterable[Manifest]) -> str:
    rows = [
        [m.rank, s.name, s.shape, s.dtype, s.dim, s.offset, s.length]
        for m in sorted(manifests, key=lambda m: m.rank)
        for s in m.slices
    ]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]
