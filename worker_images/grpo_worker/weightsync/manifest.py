"""What a trainer rank publishes: a manifest of tensor slices and one blob of their bytes."""

import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import xxhash

from grpo_worker.data.fp8 import Part
from grpo_worker.weightsync.dtypes import dtype_name

_PIECE = 16 << 20  # bytes that one thread digests at a time
_ALIGNED = 64  # a slice's place in the blob fits every dtype, so that receivers need no copy


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


def digest(data: bytes | memoryview) -> str:
    """Digest of a blob, hex: over the digests of its pieces, which threads take side by side.

    xxh3 finds damage as surely as a cryptographic hash, at ten times its speed; nobody is kept from
    forging a blob by it.
    """
    view = memoryview(data)
    pieces = [view[start : start + _PIECE] for start in range(0, len(view), _PIECE)]
    with ThreadPoolExecutor(min(len(pieces), os.cpu_count() or 1) or 1) as threads:
        parts = threads.map(lambda piece: xxhash.xxh3_128_digest(piece), pieces)
    return str(xxhash.xxh3_128_hexdigest(b"".join(parts)))


def layout(rank: int, world: int, parts: Sequence[Part]) -> Manifest:
    """What the rank's versions look like, of none in particular. The parts may be on the device meta."""
    slices = _places(parts)
    return Manifest(0, rank, world, _size(slices), "", slices)


def publish(root: Path, version: int, rank: int, world: int, parts: Sequence[Part]) -> Manifest:
    """Write blob and manifest of one rank below ``root/vN``; the manifest comes last.

    parts: (name, whole shape, dim, offset, slice). ``root`` is memory (tmpfs) shared with the
    agent of the same pod. Versions older than the previous one are removed.
    """
    directory = root / f"v{version}"
    directory.mkdir(parents=True, exist_ok=True)
    slices = _places(parts)
    size = _size(slices)
    blob = directory / f"rank-{rank}.bin"
    temporary = blob.with_suffix(".tmp")
    _forget(root, version, rank, temporary)
    found = _write_blob(temporary, size, slices, [part[-1] for part in parts])
    temporary.rename(blob)
    manifest = Manifest(version, rank, world, size, found, slices)
    _write(directory / f"rank-{rank}.json", manifest.to_json().encode())
    return manifest


def _places(parts: Sequence[Part]) -> tuple[Slice, ...]:
    slices, start = [], 0
    for name, shape, dim, offset, tensor in parts:
        nbytes = tensor.numel() * tensor.element_size()
        dtype = dtype_name(tensor.dtype)
        slices.append(Slice(name, shape, dtype, dim, offset, tensor.shape[dim], start, nbytes))
        start += -(-nbytes // _ALIGNED) * _ALIGNED
    return tuple(slices)


def _size(slices: Sequence[Slice]) -> int:
    return slices[-1].start + slices[-1].nbytes if slices else 0


def _write_blob(path: Path, size: int, slices: Sequence[Slice], tensors: Sequence[torch.Tensor]) -> str:
    """Copy the tensors straight into the file's memory; the digest of the blob."""
    if path.is_file() and path.stat().st_size != size:
        path.unlink()
    if size == 0:
        path.touch()
        return digest(b"")
    blob = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
    for part, tensor in zip(slices, tensors, strict=True):
        to = blob[part.start : part.start + part.nbytes].view(tensor.dtype).view(tensor.shape)
        to.copy_(tensor.detach())
    return digest(blob.numpy().data)


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_suffix(path.suffix + ".tmp")
    temporary.write_bytes(data)
    temporary.rename(path)


def _forget(root: Path, version: int, rank: int, reused: Path) -> None:
    """Keep the version before ``version``, which a late joiner may still be reading, and no older one.

    The memory of the last blob that goes is used again as ``reused``: the first touch of fresh memory
    takes longer than the copying. Who still reads it notices by the digest.
    """
    for directory in root.glob("v*"):
        if int(directory.name[1:]) in (version, version - 1):
            continue
        (directory / f"rank-{rank}.json").unlink(missing_ok=True)
        blob = directory / f"rank-{rank}.bin"
        if blob.is_file():
            blob.replace(reused)
        try:
            directory.rmdir()
        except OSError:
            continue  # another rank of this pod still has files there
