"""Publishing a version in the memory that the trainer pod shares with its agent."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from grpo_worker.quantization.fp8 import Part
from grpo_worker.weightsync.protocol.digest import digest
from grpo_worker.weightsync.protocol.manifest import Manifest, Slice, blob_size, rank_file, slices_of


def publish(
    root: Path, version: int, rank: int, world: int, parts: Sequence[Part], deltas: bool = False
) -> Manifest:
    """Write blob and manifest of one rank below ``root/vN``; the manifest comes last.

    parts: (name, whole shape, dim, offset, slice). ``root`` is memory (tmpfs) shared with the
    agent of the same pod. Versions older than the previous one are removed. ``deltas``: leave what changed
    since the previous one too, if that is little.
    """
    slices = slices_of(parts)
    size = blob_size(slices)
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


def _read(root: Path, version: int, rank: int) -> Manifest | None:
    path = rank_file(root, version, rank, "json")
    return Manifest.from_json(path.read_text()) if path.is_file() else None


def _compare(root: Path, version: int, base: Manifest, blob: npt.NDArray[np.uint8]) -> str:
    """Leave the delta from ``base``; the digest of ``blob``."""
    # numba takes a second to import, which jobs without deltas need not wait for.
    from grpo_worker.weightsync.protocol.delta_codec import encode

    old = np.memmap(rank_file(root, base.version, base.rank, "bin"), np.uint8, "r")
    found, delta = encode(old, blob, base.digest)
    if delta is not None:
        path = rank_file(root, version, base.rank, f"{base.digest}.delta")
        temporary = path.with_suffix(".delta.tmp")
        with temporary.open("wb") as file:
            file.writelines(delta)
        temporary.rename(path)
    return found


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
