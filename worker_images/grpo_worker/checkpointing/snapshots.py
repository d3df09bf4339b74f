"""Snapshots of ranks in a pod's memory: ``root/STEP.ATTEMPT/rank-R.pt`` with a digest beside each.

The attempt is part of the name: two attempts may reach a step with other bits, and must not mix.
"""

import hashlib
import json
import re
from pathlib import Path

import httpx

from grpo_worker.common.auth import headers
from grpo_worker.common.files import write_text

KEEP = 2  # of each rank: the newest may still be on its way to other pods
CHUNK = 16 << 20


def name_of(step: int, attempt: int) -> str:
    """Name of the snapshot that an attempt takes after a step."""
    return f"{step}.{attempt}"


def file_of(root: Path, name: str, rank: int) -> Path:
    """Where a rank's snapshot lies. Raises ValueError for a name that is none."""
    if not re.fullmatch(r"[0-9]+\.[0-9]+", name):
        raise ValueError(f"{name!r} is no name of a snapshot: STEP.ATTEMPT")
    return root / name / f"rank-{rank}.pt"


def seal(file: Path) -> None:
    """Say that a snapshot is whole, by its digest; forget the rank's older ones."""
    note = {"bytes": file.stat().st_size, "digest": _digest(file)}
    write_text(file.with_suffix(".json"), json.dumps(note))
    _forget(file)


def sound(root: Path, name: str, rank: int) -> bool:
    """Is the rank's snapshot here, every byte of it?"""
    file = file_of(root, name, rank)
    try:
        note = json.loads(file.with_suffix(".json").read_text())
        return bool(file.stat().st_size == note["bytes"] and _digest(file) == note["digest"])
    except (OSError, ValueError, KeyError):
        return False


def pull(root: Path, name: str, rank: int, holders: list[str], timeout: float) -> bool:
    """Have a sound snapshot here: our own, or the first that a holder (base URL of an agent) gives."""
    if sound(root, name, rank):
        return True
    for holder in holders:
        try:
            _fetch(f"{holder}/v1/snapshots/{name}/{rank}", file_of(root, name, rank), timeout)
        except (httpx.HTTPError, OSError):
            continue
        if sound(root, name, rank):
            _forget(file_of(root, name, rank))
            return True
    return False


def _fetch(url: str, file: Path, timeout: float) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    for suffix in (".pt", ".json"):
        temporary = file.with_suffix(f".pulled{suffix}")
        request = httpx.stream("GET", url + suffix, timeout=timeout, headers=headers())
        with request as response, temporary.open("wb") as handle:
            response.raise_for_status()
            for chunk in response.iter_bytes(CHUNK):
                handle.write(chunk)
        temporary.rename(file.with_suffix(suffix))


def _digest(file: Path) -> str:
    found = hashlib.blake2b(digest_size=16)
    with file.open("rb") as handle:
        while chunk := handle.read(CHUNK):
            found.update(chunk)
    return found.hexdigest()


def _forget(newest: Path) -> None:
    notes = sorted(
        newest.parent.parent.glob(f"*/{newest.stem}.json"), key=lambda note: note.stat().st_mtime_ns
    )
    for note in notes[:-KEEP]:
        note.unlink(missing_ok=True)
        note.with_suffix(".pt").unlink(missing_ok=True)
