"""Snapshots of ranks in a pod's memory: ``root/STEP.ATTEMPT/rank-R.pt``, each with a digest file.

The attempt is part of the name because two attempts may reach a step with different bits, which must not be
mixed. A pod keeps two snapshots at most, and the plan of its memory counts on that: the newest complete one,
and the one that is being written or copied.
"""

import hashlib
import json
import re
import shutil
from pathlib import Path

import httpx

from grpo_worker.common.auth import headers
from grpo_worker.common.files import write_text

CHUNK = 16 << 20


def name_of(step: int, attempt: int) -> str:
    """Return the name of the snapshot that an attempt takes after a step."""
    return f"{step}.{attempt}"


def attempt_of(name: str) -> int:
    """Return the attempt that took a snapshot. Raises ValueError for an invalid name."""
    return _order(name)[0]


def file_of(root: Path, name: str, rank: int) -> Path:
    """Return the path of a rank's snapshot. Raises ValueError for an invalid name."""
    _order(name)
    return root / name / f"rank-{rank}.pt"


def remove_older(root: Path, name: str, kept: str | None) -> None:
    """Remove all ranks' snapshots that are older than ``name``, complete or not, except ``kept``.

    Newer ones stay, because a late request may name a snapshot of an attempt that has ended. Raises
    ValueError for an invalid name.
    """
    newest = _order(name)
    for folder in root.glob("*.*"):
        if folder.name != kept and _order(folder.name) < newest:
            shutil.rmtree(folder, ignore_errors=True)  # other ranks of the pod remove it too


def seal(file: Path) -> None:
    """Mark a snapshot as complete by writing its digest."""
    note = {"bytes": file.stat().st_size, "digest": _digest(file)}
    write_text(file.with_suffix(".json"), json.dumps(note))


def sound(root: Path, name: str, rank: int) -> bool:
    """Return whether the rank's snapshot is here and matches its digest."""
    file = file_of(root, name, rank)
    try:
        note = json.loads(file.with_suffix(".json").read_text())
        return bool(file.stat().st_size == note["bytes"] and _digest(file) == note["digest"])
    except (OSError, ValueError, KeyError):
        return False


def pull(root: Path, name: str, rank: int, holders: list[str], timeout: float) -> bool:
    """Fetch the rank's snapshot from the first holder that has it; return whether it is here and sound.

    ``holders``: base URLs of agents. Nothing is fetched if this pod has a sound copy.
    """
    if sound(root, name, rank):
        return True
    for holder in holders:
        try:
            _fetch(f"{holder}/v1/snapshots/{name}/{rank}", file_of(root, name, rank), timeout)
        except (httpx.HTTPError, OSError):
            continue
        if sound(root, name, rank):
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
    digest = hashlib.blake2b(digest_size=16)
    with file.open("rb") as handle:
        while chunk := handle.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _order(name: str) -> tuple[int, int]:
    """Return the attempt and the step of a snapshot: later attempts are newer, also at an earlier step."""
    if not re.fullmatch(r"[0-9]+\.[0-9]+", name):
        raise ValueError(f"{name!r} is not the name of a snapshot: use STEP.ATTEMPT")
    step, attempt = name.split(".")
    return int(attempt), int(step)
