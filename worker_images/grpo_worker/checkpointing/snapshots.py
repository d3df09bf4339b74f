"""Snapshots of ranks in a pod's memory: ``root/STEP.ATTEMPT/rank-R.safetensors``, each with a sealed note.

A rank marks its file as written (``rank-R.written``), and the pod's agent seals that mark (``rank-R.json``).

The attempt is part of the name because two attempts may reach a step with different bits, which must not be
mixed. A pod keeps two snapshots at most, and the plan of its memory counts on that: the newest complete one,
and the one that is being written or copied.
"""

import re
import shutil
from pathlib import Path

from grpo_worker.checkpointing.snapshot_seal import NOTE_BYTES, Note, Snapshot, SnapshotError, content_digest
from grpo_worker.common.files import write_text

STATE, NOTE = ".safetensors", ".json"
_MARK = ".written"
_CHUNK = 1 << 20


def name_of(step: int, attempt: int) -> str:
    """Return the name of the snapshot that an attempt takes after a step."""
    return f"{step}.{attempt}"


def attempt_of(name: str) -> int:
    """Return the attempt that took a snapshot. Raises ValueError for an invalid name."""
    return _order(name)[0]


def file_of(root: Path, name: str, rank: int) -> Path:
    """Return the path of a rank's snapshot. Raises ValueError for an invalid name."""
    _order(name)
    return root / name / f"rank-{rank}{STATE}"


def remove_older(root: Path, name: str, kept: str | None) -> None:
    """Remove all ranks' snapshots that are older than ``name``, complete or not, except ``kept``.

    Newer ones stay, because a late request may name a snapshot of an attempt that has ended. Raises
    ValueError for an invalid name.
    """
    newest = _order(name)
    for folder in root.glob("*.*"):
        if folder.name != kept and _order(folder.name) < newest:
            shutil.rmtree(folder, ignore_errors=True)  # other ranks of the pod remove it too


def mark_written(file: Path, digest: str) -> None:
    """Mark a snapshot as completely written. ``digest``: of its content."""
    write_text(file.with_suffix(_MARK), Note(file.stat().st_size, digest).text())


def is_written(root: Path, name: str, rank: int) -> bool:
    """Return whether the rank of this pod has written its snapshot."""
    return file_of(root, name, rank).with_suffix(_MARK).is_file()


def seal(root: Path, which: Snapshot) -> None:
    """Seal the snapshot that a rank of this pod has written.

    Raises SnapshotError when there is none, ValueError for an invalid name, and PermissionError when the key
    cannot be read.
    """
    file = file_of(root, which.name, which.rank)
    note = _note(file.with_suffix(_MARK))
    _check_size(file, note)
    write_text(file.with_suffix(NOTE), note.sealed(which).text())


def check(root: Path, which: Snapshot) -> None:
    """Raise SnapshotError unless the snapshot is here, is sealed as this one, and has the sealed bytes."""
    file = file_of(root, which.name, which.rank)
    note = _note(file.with_suffix(NOTE))
    note.verify(which)
    _check_size(file, note)
    digest = content_digest()
    with file.open("rb") as handle:
        while chunk := handle.read(_CHUNK):
            digest.update(chunk)
    if digest.hexdigest() != note.digest:
        raise SnapshotError("its bytes have changed since it was sealed")


def _note(path: Path) -> Note:
    try:
        with path.open("rb") as handle:
            return Note.parse(handle.read(NOTE_BYTES))
    except FileNotFoundError as error:
        raise SnapshotError(f"there is no {path.name}") from error


def _check_size(file: Path, note: Note) -> None:
    size = file.stat().st_size if file.is_file() else 0
    if size != note.size:
        raise SnapshotError(f"it has {size} bytes instead of {note.size}")


def _order(name: str) -> tuple[int, int]:
    """Return the attempt and the step of a snapshot: later attempts are newer, also at an earlier step."""
    if not re.fullmatch(r"[0-9]+\.[0-9]+", name):
        raise ValueError(f"{name!r} is not the name of a snapshot: use STEP.ATTEMPT")
    step, attempt = name.split(".")
    return int(attempt), int(step)
