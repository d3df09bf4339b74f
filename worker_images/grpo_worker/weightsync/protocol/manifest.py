"""Manifest of a rank: the tensor slices that it owns and their places in its blob."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from grpo_worker.quantization.fp8 import Part
from grpo_worker.weightsync.protocol.buffers import aligned, dtype_name


@dataclass(frozen=True, slots=True)
class Slice:
    """A box of one Hugging Face tensor and its place in the rank's blob (bytes)."""

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
    """All slices that one rank owns at one version."""

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
    """What the rank's versions look like, of none in particular. The parts may be on the device meta."""
    slices = slices_of(parts)
    return Manifest(0, rank, world, blob_size(slices), "", slices)


def rank_file(root: Path, version: int, rank: int, kind: str) -> Path:
    """Where a rank leaves its version below ``root``. ``kind``: json, bin, or DIGEST.delta for what changed
    since the blob of that digest."""
    return root / f"v{version}" / f"rank-{rank}.{kind}"


def slices_of(parts: Sequence[Part]) -> tuple[Slice, ...]:
    """Slices of ``parts`` in order, each aligned in the blob."""
    slices, start = [], 0
    for name, shape, dim, offset, tensor in parts:
        nbytes = tensor.numel() * tensor.element_size()
        dtype = dtype_name(tensor.dtype)
        slices.append(Slice(name, shape, dtype, dim, offset, tensor.shape[dim], start, nbytes))
        start += aligned(nbytes)  # so that receivers need no copy
    return tuple(slices)


def blob_size(slices: Sequence[Slice]) -> int:
    """Bytes of the blob."""
    return slices[-1].start + slices[-1].nbytes if slices else 0
