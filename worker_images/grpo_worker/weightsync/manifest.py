"""What a trainer rank publishes: a manifest of tensor slices and one blob of their bytes."""

import json
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from grpo_worker.quantization.fp8 import Part
from grpo_worker.weightsync.dtypes import dtype_name
from grpo_worker.weightsync.places import aligned

PIECE = 16 << 20  # bytes that one thread digests at a time


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
    pieces = [view[start : start + PIECE] for start in range(0, len(view), PIECE)]
    with ThreadPoolExecutor(min(len(pieces), os.cpu_count() or 1) or 1) as threads:
        return digest_of(threads.map(lambda piece: xxhash.xxh3_128_digest(piece), pieces))


def digest_of(pieces: Iterable[bytes]) -> str:
    """Digest of a blob whose pieces of PIECE bytes have these."""
    return str(xxhash.xxh3_128_hexdigest(b"".join(pieces)))


def layout(rank: int, world: int, parts: Sequence[Part]) -> Manifest:
    """What the rank's versions look like, of none in particular. The parts may be on the device meta."""
    slices = _places(parts)
    return Manifest(0, rank, world, _size(slices), "", slices)


def publish(
    root: Path, version: int, rank: int, world: int, parts: Sequence[Part], deltas: bool = False
) -> Manifest:
    """Write blob and manifest of one rank below ``root/vN``; the manifest comes last.

    parts: (name, whole shape, dim, offset, slice). ``root`` is memory (tmpfs) shared with the
    agent of the same pod. Versions older than the previous one are removed. ``deltas``: leave what changed
    since the previous one too, if that is little.
    """
    slices = _places(parts)
    size = _size(slices)
    blob = rank_file(root, version, rank, "bin")
    blob.parent.mkdir(parents=True, exist_ok=True)
    temporary = blob.with_suffix(".tmp")
    _forget(root, version, rank, temporary)
    data = _write_blob(temporary, size, slices, [part[-1] for part in parts])
    base = _read(root, version - 1, rank) if deltas and size else None
    if base is not None and base.slices == slices:
        found = _compare(root, version, base, data)
    else:
        found = digest(data.data)
    temporary.rename(blob)
    manifest = Manifest(version, rank, world, size, found, slices)
    _write(rank_file(root, version, rank, "json"), manifest.to_json().encode())
    return manifest


def rank_file(root: Path, version: int, rank: int, kind: str) -> Path:
    """Where a rank leaves its version below ``root``. ``kind``: json, bin, or DIGEST.delta for what changed
    since the blob of that digest."""
    return root / f"v{version}" / f"rank-{rank}.{kind}"


def _read(root: Path, version: int, rank: int) -> Manifest | None:
    path = rank_file(root, version, rank, "json")
    return Manifest.from_json(path.read_text()) if path.is_file() else None


def _compare(root: Path, version: int, base: Manifest, blob: npt.NDArray[np.uint8]) -> str:
    """Leave the delta from ``base``; the digest of ``blob``."""
    from grpo_worker.weightsync.delta import encode  # numba takes a second that most need not wait

    old = np.memmap(rank_file(root, base.version, base.rank, "bin"), np.uint8, "r")
    found, delta = encode(old, blob, base.digest)
    if delta is not None:
        path = rank_file(root, version, base.rank, f"{base.digest}.delta")
        temporary = path.with_suffix(".delta.tmp")
        with temporary.open("wb") as file:
            file.writelines(delta)
        temporary.rename(path)
    return found


def _places(parts: Sequence[Part]) -> tuple[Slice, ...]:
    slices, start = [], 0
    for name, shape, dim, offset, tensor in parts:
        nbytes = tensor.numel() * tensor.element_size()
        dtype = dtype_name(tensor.dtype)
        slices.append(Slice(name, shape, dtype, dim, offset, tensor.shape[dim], start, nbytes))
        start += aligned(nbytes)  # so that receivers need no copy
    return tuple(slices)


def _size(slices: Sequence[Slice]) -> int:
    return slices[-1].start + slices[-1].nbytes if slices else 0


def _write_blob(
    path: Path, size: int, slices: Sequence[Slice], tensors: Sequence[torch.Tensor]
) -> npt.NDArray[np.uint8]:
    """Copy the tensors straight into the file's memory, uint8 [size]."""
    if path.is_file() and path.stat().st_size != size:
        path.unlink()
    if size == 0:
        path.touch()
        return np.empty(0, dtype=np.uint8)
    blob = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
    for part, tensor in zip(slices, tensors, strict=True):
        to = blob[part.start : part.start + part.nbytes].view(tensor.dtype).view(tensor.shape)
        to.copy_(tensor.detach())
    return blob.numpy()


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
        for delta in directory.glob(f"rank-{rank}.*.delta*"):
            delta.unlink()  # from a version that few hold by now
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
