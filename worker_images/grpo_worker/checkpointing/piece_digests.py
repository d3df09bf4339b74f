"""Digests of the pieces of a checkpoint's state files: of the tensors and objects that ranks save.

A rank computes them while it writes a file, and leaves them in a file beside it. The checkpoint's marker has
the digests of these small files: so a rank that reads a piece knows that it is the one that was written, and
no process sees the digests of all pieces.

On one core of a Xeon at 2.8 GHz xxh3 took 8.3 GB/s, CRC-32 2.3, SHA-256 1.0 and BLAKE2b 0.6. A writer, whose
torch.save computes a CRC-32 of each tensor anyway, took 0.64 s of CPU for a GB in memory, 0.77 s with xxh3,
and with SHA-256 0.8 s more. None of them protects against somebody who may write to the folder. Objects have
SHA-256: requests to their server take longer.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import xxhash

from grpo_worker.checkpointing.store import (
    MARKER,
    PIECES,
    DamagedCheckpointError,
    state_folder,
)
from grpo_worker.common.store_path import StorePath, patiently

OF_OBJECTS, OF_FILES = PIECES
_NEW: dict[str, Callable[..., Any]] = {OF_OBJECTS: hashlib.sha256, OF_FILES: xxhash.xxh3_128}


class PieceNotes:
    """Digests of the pieces of one file that is being written. ``kind``: one of ``PIECES``."""

    def __init__(self, kind: str) -> None:
        self._new = _NEW[kind]
        self._digest = self._new()
        self._pieces: list[tuple[int, int, str]] = []  # first byte, length and digest

    def add(self, data: Any) -> None:
        """Add bytes to the current piece."""
        self._digest.update(data)

    def end_piece(self, position: int) -> None:
        """End the current piece. ``position``: in the file, behind the piece."""
        start = sum(self._pieces[-1][:2]) if self._pieces else 0
        self._pieces.append((start, position - start, self._digest.hexdigest()))
        self._digest = self._new()

    def text(self) -> str:
        """Return the content of the file with the digests."""
        return json.dumps(self._pieces)


def write_pieces(stream: Any, pieces: Sequence[Callable[[Any], Any]]) -> list[Any]:
    """Let functions write one piece each to a stream; return their results.

    ``stream``: has ``notes`` of its pieces, and in ``problem`` the error of a write that failed.
    """
    results = []
    try:
        for write in pieces:
            results.append(write(stream))
            stream.notes.end_piece(stream.tell())
    except Exception:
        if stream.problem is not None:  # torch replaces errors of a stream by one about its position
            raise stream.problem from None
        raise
    return results


class PieceDigests:
    """Digests of one checkpoint's pieces, read when they are needed.

    ``sealed``: digests of the files with these digests, from the checkpoint's marker.
    """

    def __init__(self, folder: StorePath, sealed: Mapping[str, str]) -> None:
        self._folder, self._sealed = folder, sealed
        self._known: dict[str, dict[tuple[int, int], str]] = {}

    @classmethod
    def of(cls, path: StorePath) -> "PieceDigests":
        """Return those of a complete checkpoint, none if it was saved by an earlier version."""
        marker = json.loads((path / MARKER).read_text())
        return cls(state_folder(path), marker.get("digests", {}))

    def check(self, name: str, start: int, length: int, piece: bytes) -> bool:
        """Return whether the file ``name`` has digests, by which the piece is then as it was written.

        Raises DamagedCheckpointError if it is another one.
        """
        kind = next((kind for kind in PIECES if name + kind in self._sealed), None)
        if kind is None:
            return False
        if name not in self._known:
            self._known[name] = self._read(name + kind)
        expected, found = self._known[name].get((start, length)), _NEW[kind](piece).hexdigest()
        if found != expected:
            raise DamagedCheckpointError(
                f"checkpoint {self._folder}: {name} was changed after the save, between bytes {start} and "
                f"{start + length}: the {kind[1:]} of its {len(piece)} bytes there is {found}, and "
                f"{expected or 'none'} was saved; use an older checkpoint"
            )
        return True

    def _read(self, name: str) -> dict[tuple[int, int], str]:
        file, expected = self._folder / name, self._sealed[name]
        try:
            text = patiently(file.read_bytes, f"reading {file}")
        except FileNotFoundError as error:
            raise DamagedCheckpointError(
                f"checkpoint {self._folder}: {name} is missing; use an older checkpoint"
            ) from error
        found = hashlib.sha256(text).hexdigest()
        if found != expected:
            raise DamagedCheckpointError(
                f"checkpoint {self._folder}: {name} was changed after the save: its sha256 is {found}, and "
                f"{expected} was saved; use an older checkpoint"
            )
        return {(start, length): digest for start, length, digest in json.loads(text)}
