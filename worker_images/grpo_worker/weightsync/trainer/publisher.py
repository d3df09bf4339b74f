"""Publisher: writes a rank's version into the memory that the trainer pod shares with its sidecar."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from grpo_worker.profiling.progress import PROGRESS
from grpo_worker.quantization.fp8 import Part
from grpo_worker.weightsync.protocol.digest import digest_of, piece_digests
from grpo_worker.weightsync.protocol.manifest import Manifest, Slice, blob_size, rank_file, slices_of


def publish(
    root: Path, version: int, rank: int, world: int, parts: Sequence[Part], deltas: bool = False
) -> Manifest:
    """Write blob and manifest of one rank below ``root/vN``; the manifest is written last.

    ``root``: memory (tmpfs) shared with the sidecar. ``parts``: (name, whole shape, dim, offset, slice).
    ``deltas``: also write the changes to the previous version, unless they are too many.
    Versions older than the previous one are removed.
    """
    slices = slices_of(parts)
    size = blob_size(slices)
    blob = rank_file(root, version, rank, "bin")
    blob.parent.mkdir(parents=True, exist_ok=True)
    temporary = blob.with_suffix(".tmp")
    _remove_old(root, version, rank, temporary)
    data = _write_blob(temporary, size, slices, [part[-1] for part in parts])
    base = _read(root, version - 1, rank) if deltas and size else None
    manifest = Manifest(version, rank, world, size, "", slices)
    if base is not None and base.slices == slices:
        digests = _write_delta(root, manifest, base, data)
    else:
        digests = piece_digests(data.data, manifest.pieces)
    temporary.rename(blob)
    manifest = replace(manifest, digest=digest_of(digests), piece_digests=digests)
    _write(rank_file(root, version, rank, "json"), manifest.to_json().encode())
    return manifest


def _read(root: Path, version: int, rank: int) -> Manifest | None:
    path = rank_file(root, version, rank, "json")
    return Manifest.from_json(path.read_text()) if path.is_file() else None


def _write_delta(root: Path, manifest: Manifest, base: Manifest, blob: npt.NDArray[np.uint8]) -> bytes:
    """Write the delta from ``base`` unless it is too large; return the digests of the pieces of ``blob``."""
    # numba takes a second to import; jobs without deltas need not wait for it.
    from grpo_worker.weightsync.protocol.delta_codec import encode

    old = np.memmap(rank_file(root, base.version, base.rank, "bin"), np.uint8, "r")
    digests, delta = encode(old, blob, base.digest, list(manifest.pieces))
    if delta is not None:
        path = rank_file(root, manifest.version, base.rank, f"{base.digest}.delta")
        temporary = path.with_suffix(".delta.tmp")
        with temporary.open("wb") as file:
            file.writelines(delta)
        temporary.rename(path)
    return digests


def _write_blob(
    path: Path, size: int, slices: Sequence[Slice], tensors: Sequence[torch.Tensor]
) -> npt.NDArray[np.uint8]:
    """Copy the tensors into the memory-mapped file; return its bytes, uint8 [size]."""
    if path.is_file() and path.stat().st_size != size:
        path.unlink()
    if size == 0:
        path.touch()
        return np.empty(0, dtype=np.uint8)
    blob = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
    for part, tensor in zip(slices, tensors, strict=True):
        target = blob[part.start : part.start + part.nbytes].view(tensor.dtype).view(tensor.shape)
        target.copy_(tensor.detach())
        PROGRESS.add("bytes published", part.nbytes)
    return blob.numpy()


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_suffix(path.suffix + ".tmp")
    temporary.write_bytes(data)
    temporary.rename(path)


def _remove_old(root: Path, version: int, rank: int, reused: Path) -> None:
    """Remove this rank's versions older than the previous one, which slow engines may still be reading.

    The last removed blob becomes ``reused``, because first writes to new memory take longer than the copy.
    An engine that still reads it detects the change by its digest.
    """
    for directory in root.glob("v*"):
        for delta in directory.glob(f"rank-{rank}.*.delta*"):
            delta.unlink()  # hardly any engine still holds its base
        if int(directory.name[1:]) in (version, version - 1):
            continue
        (directory / f"rank-{rank}.json").unlink(missing_ok=True)
        blob = directory / f"rank-{rank}.bin"
        if blob.is_file():
            blob.replace(reused)
        try:
            directory.rmdir()
        except OSError:
            continue  # other ranks of this pod still have files in it
