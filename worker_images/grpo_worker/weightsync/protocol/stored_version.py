"""Files of a weight version in the checkpoint store: a copy of what each trainer rank has published.

The manifest's name contains its digest, so that damage to it is found like damage to a blob.
"""

from pathlib import Path

from grpo_worker.weightsync.protocol.digest import digest
from grpo_worker.weightsync.protocol.manifest import Manifest


class StoredVersionError(ValueError):
    """A file of a stored version is damaged; the message names it."""


def stored_blob(folder: Path, rank: int) -> Path:
    """Return the file with the blob of a rank."""
    return folder / f"rank-{rank}.bin"


def stored_manifest(folder: Path, rank: int, text: bytes) -> Path:
    """Return the file for the manifest of a rank, whose JSON is ``text``."""
    return folder / f"rank-{rank}-{digest(text)}.json"


def manifests_in(folder: Path) -> list[Path]:
    """Return the manifests of all ranks whose copy is complete, in any order."""
    return list(folder.glob("rank-*.json"))


def read_manifest(file: Path) -> Manifest:
    """Read a manifest. Raises OSError, or StoredVersionError for other bytes than were written."""
    text = file.read_bytes()
    if not file.stem.endswith(f"-{digest(text)}"):
        raise StoredVersionError(f"{file}: another digest than in its name")
    return Manifest.from_json(text)
