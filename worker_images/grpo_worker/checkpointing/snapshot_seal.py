"""Seals of snapshots: proof that an agent of this job took a rank's snapshot from its own pod.

A rank computes the digest of its snapshot while it writes it. The agent of its pod, which has the job's
key, seals the digest together with the job, the snapshot's name and the rank. Nobody without the key can pass
off other bytes, or the snapshot of another job, step, attempt or rank.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from grpo_worker.common.auth import is_signed, signature

NOTE_BYTES = 4096  # more than a note ever has
_PURPOSE = b"grpo snapshots"


def content_digest() -> "hashlib.blake2b":
    """Return the digest of a file's bytes, still of none."""
    return hashlib.blake2b(digest_size=32)


class SnapshotError(RuntimeError):
    """A snapshot is missing, damaged or not one of this job."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Which snapshot it is. ``job``: name of the job's folder in the store."""

    job: str
    name: str
    rank: int

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Self:
        """Return the snapshot that a request names. Raises ValueError if it names none."""
        try:
            return cls(str(body["job"]), str(body["name"]), int(body["rank"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"the request must name job, name and rank: {error!r}") from error

    def __str__(self) -> str:
        return f"snapshot {self.name} of rank {self.rank}"


@dataclass(frozen=True, slots=True)
class Note:
    """Description of a snapshot's file. ``seal``: empty until the agent has sealed it."""

    size: int
    digest: str
    seal: str = ""

    @classmethod
    def parse(cls, text: bytes | str) -> Self:
        """Return the note in a file or an answer. Raises SnapshotError if it is none."""
        try:
            note = json.loads(text)
            return cls(int(note["size"]), str(note["digest"]), str(note["seal"]))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise SnapshotError(f"its note is not readable: {error!r}") from error

    def text(self) -> str:
        """Return the note as it is written to a file."""
        return json.dumps(asdict(self))

    def sealed(self, which: Snapshot) -> "Note":
        """Return the note with its seal. Raises PermissionError when the key cannot be read."""
        return Note(self.size, self.digest, signature(_PURPOSE, self._content(which)))

    def verify(self, which: Snapshot) -> None:
        """Raise SnapshotError unless an agent with this job's key has sealed it as ``which``."""
        if not is_signed(_PURPOSE, self._content(which), self.seal):
            raise SnapshotError("its seal is of another key, job, snapshot or rank")

    def _content(self, which: Snapshot) -> list[str | int]:
        return [which.job, which.name, which.rank, self.size, self.digest]
