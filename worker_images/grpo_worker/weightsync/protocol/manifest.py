"""Manifest of a trainer rank: the tensor slices that it owns and their positions in its blob."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_worker.common.known_fields import known
from grpo_worker.weightsync.protocol.buffers import aligned, dtype_name
from grpo_worker.weightsync.protocol.digest import SIZE, Bounds, pieces_of

if TYPE_CHECKING:  # rollout agents import no torch
    from grpo_worker.quantization.fp8 import Part


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
    """All slices that one rank of ``world`` owns at one version.

    ``digest``: of its blob. ``piece_digests``: of the pieces of its slices; empty in a layout.
    """

    version: int
    rank: int
    world: int
    blob_bytes: int
    digest: str
    slices: tuple[Slice, ...]
    piece_digests: bytes = b""

    def to_json(self) -> str:
        """Return the manifest as JSON; a slice is the list of its fields."""
        rows = [astuple(part) for part in self.slices]
        fields = asdict(replace(self, slices=())) | {
            "slices": rows,
            "piece_digests": self.piece_digests.hex(),
        }
        return json.dumps(fields, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> "Manifest":
        data = json.loads(text)
        slices = tuple(_slice(*row) for row in data.pop("slices"))
        digests = bytes.fromhex(data.pop("piece_digests"))
        return cls(slices=slices, piece_digests=digests, **known(cls, data))

    @property
    def pieces(self) -> Iterator[Bounds]:
        """The pieces of the blob that ``piece_digests`` belong to, in order."""
        return pieces_of((part.start, part.start + part.nbytes) for part in self.slices)

    def digests_of_slices(self) -> dict[int, bytes]:
        """Return the digests of the pieces of each slice, by the slice's first byte."""
        found, at = {}, 0
        for part in self.slices:
            size = SIZE * sum(1 for _ in pieces_of([(part.start, part.start + part.nbytes)]))
            found[part.start] = self.piece_digests[at : at + size]
            at += size
        return found


def _slice(name: str, shape: list[int], dtype: str, *numbers: int) -> Slice:
    # A hundred thousand slices share a few shapes and dtypes, and the ranks share names.
    return Slice(sys.intern(name), _shared(tuple(shape)), sys.intern(dtype), *numbers)


@lru_cache(4096)
def _shared(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape


def layout(rank: int, world: int, parts: "Sequence[Part]") -> Manifest:
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


def slices_of(parts: "Sequence[Part]") -> tuple[Slice, ...]:
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
