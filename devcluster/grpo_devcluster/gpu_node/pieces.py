"""Pieces in which a pack is brought to a machine that takes a limited number of bytes at a time."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from grpo_devcluster.stages import StageError

# A call takes 64 MiB: the pieces, the checkout with its 10 MiB, and what a transfer adds to each file.
CALL_BYTES = 49 * 2**20
MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class Piece:
    """A file of a pack: an archive, or a part of one that is larger than a call.

    ``archive``: its name, which has the key of its content. ``part``: its number, from 0. ``call``: from 1.
    """

    archive: str
    part: int
    bytes: int
    sha256: str
    call: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.bytes <= CALL_BYTES:
            raise ValueError(
                f"bytes is {self.bytes}, not within 1..{CALL_BYTES}: cut {self.archive} into parts"
            )

    @property
    def file(self) -> str:
        """Return the name of the file."""
        return f"{self.archive}.txz.{self.part}"


@dataclass(frozen=True, slots=True)
class Manifest:
    """All pieces of a pack, in the order in which they are brought."""

    pieces: tuple[Piece, ...]

    @property
    def calls(self) -> int:
        """Return in how many calls the pack is brought."""
        return max((piece.call for piece in self.pieces), default=0)

    def archives(self) -> dict[str, list[Piece]]:
        """Return the parts of each archive in order."""
        archives: dict[str, list[Piece]] = {}
        for piece in sorted(self.pieces, key=lambda p: (p.archive, p.part)):
            archives.setdefault(piece.archive, []).append(piece)
        return archives

    def to_json(self) -> str:
        """Return the text of the manifest file."""
        return json.dumps([asdict(piece) for piece in self.pieces], indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """Return the manifest of a manifest file's text."""
        return cls(tuple(Piece(**fields) for fields in json.loads(text)))


def cut(archive: str, content: bytes, limit: int = CALL_BYTES) -> list[tuple[Piece, bytes]]:
    """Return the parts of an archive, each of at most ``limit`` bytes, with their content."""
    chunks = [content[start : start + limit] for start in range(0, len(content), limit)]
    return [
        (Piece(archive, number, len(chunk), hashlib.sha256(chunk).hexdigest()), chunk)
        for number, chunk in enumerate(chunks)
    ]


def into_calls(groups: Iterable[Sequence[Piece]], limit: int = CALL_BYTES) -> Manifest:
    """Distribute pieces over calls of at most ``limit`` bytes, a later group's after those before it.

    The largest come first, each into the first call with room, where a group begins with the last call of the
    group before it.
    """
    filled: list[int] = []
    placed: list[Piece] = []
    for group in groups:
        first = max(len(filled) - 1, 0)
        for piece in sorted(group, key=lambda p: (-p.bytes, p.file)):
            room = (i for i in range(first, len(filled)) if filled[i] + piece.bytes <= limit)
            index = next(room, len(filled))
            if index == len(filled):
                filled.append(0)
            filled[index] += piece.bytes
            placed.append(Piece(piece.archive, piece.part, piece.bytes, piece.sha256, index + 1))
    return Manifest(tuple(sorted(placed, key=lambda p: (p.call, p.file))))


def check(piece: Piece, path: Path) -> bool:
    """Return whether the file of a piece is here. Raises StageError if its content is another one."""
    if not path.exists():
        return False
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != piece.sha256:
        raise StageError(f"{path}: sha256 is {digest}, not {piece.sha256}. Bring call {piece.call} again.")
    return True
