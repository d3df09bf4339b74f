"""What a trainer rank publishes: a manifest of tensor slices and one blob of their bytes."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from grpo_worker.weightsync.dtypes import dtype_name


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
    """Digest of a blob, hex."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


Part = tuple[str, tuple[int, ...], int, int, torch.Tensor]  # name, whole shape, dim, offset, slice


def publish(root: Path, version: int, rank: int, world: int, parts: list[Part]) -> Manifest:
    """Write blob and manifest of one rank below ``root/vN``; the manifest comes last.

    parts: (name, whole shape, dim, offset, slice). ``root`` is memory (tmpfs) shared with the
    agent of the same pod. Versions older than the previous one are removed.
    """
    directory = root / f"v{version}"
    directory.mkdir(parents=True, exist_ok=True)
    slices, chunks, start = [], [], 0
    for name, shape, dim, offset, tensor in parts:
        data = tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
        slices.append(
            Slice(name, shape, dtype_name(tensor.dtype), dim, offset, tensor.shape[dim], start, len(data))
        )
        chunks.append(data)
        start += len(data)
    blob = b"".join(chunks)
    manifest = Manifest(version, rank, world, len(blob), digest(blob), tuple(slices))
    _write(directory / f"rank-{rank}.bin", blob)
    _write(directory / f"rank-{rank}.json", manifest.to_json().encode())
    _forget(root, version, rank)
    return manifest


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_suffix(path.suffix + ".tmp")
    temporary.write_bytes(data)
    temporary.rename(path)


def _forget(root: Path, version: int, rank: int) -> None:
    """Keep this version and the one before: a late joiner may still be reading that."""
    for directory in root.glob("v*"):
        if int(directory.name[1:]) not in (version, version - 1):
            for name in (f"rank-{rank}.json", f"rank-{rank}.bin"):
                (directory / name).unlink(missing_ok=True)
            try:
                directory.rmdir()
            except OSError:
                continue  # another rank of this pod still has files there
