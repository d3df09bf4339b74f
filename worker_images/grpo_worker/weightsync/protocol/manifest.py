"""Manifest of a trainer rank: the tensor slices that it owns and their positions in its blob."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from grpo_worker.quantization.fp8 import Part
from grpo_worker.weightsync.protocol.buffers import aligned, dtype_name


@dataclass(frozen=True, slots=True)
class Slice:
    """Slice of one Hugging Face tensor, and its position in the rank's blob.

    ``shape``: of the whole tensor. ``offset``, ``length``: elements along ``dim``.
    ``start``, ``nbytes``: bytes in the blob.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    dim: int
    offset: int
    length: int
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """All slices that one rank of ``world`` owns at one version. ``digest``: of its blob."""

    version: int
    rank: int
    world: int
    blob_bytes: int
    digest: str
    slices: tuple[Slice, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "Manifest":
        data = json.loads(text)
        slices = tuple(Slice(**{**s, "shape": tuple(s["shape"])}) for s in data.pop("slices"))
        return cls(slices=slices, **data)


def layout(rank: int, world: int, parts: Sequence[Part]) -> Manifest:
    """Return a manifest without version and digest: the layout that all versions of a rank share.

    ``parts`` may be on the device meta.
    """
    slices = slices_of(parts)
    return Manifest(0, rank, world, blob_size(slices), "", slices)


def rank_file(root: Path, version: int, rank: int, suffix: str) -> Path:
    """Return the path of a rank's file of a version below ``root``.

    ``suffix``: ``json`` (manifest), ``bin`` (blob) or ``DIGEST.delta`` (changes to the blob of that digest).
    """
    return root / f"v{version}" / f"rank-{rank}.{suffix}"


def slices_of(parts: Sequence[Part]) -> tuple[Slice, ...]:
    """Return the slices of ``parts`` in order, each aligned in the blob."""
    slices, start = [], 0
    for name, shape, dim, offset, tensor in parts:
        nbytes = tensor.numel() * tensor.element_size()
        dtype = dtype_name(tensor.dtype)
        slices.append(Slice(name, shape, dtype, dim, offset, tensor.shape[dim], start, nbytes))
        start += aligned(nbytes)  # receivers can then view the slice without a copy
    return tuple(slices)


def blob_size(slices: Sequence[Slice]) -> int:
    """Return the blob's size in bytes."""
    return slices[-1].start + slices[-1].nbytes if slices else 0
