"""Files of a rank's state in a file system, written with the digest of each of their pieces."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from grpo_worker.checkpointing.piece_digests import OF_FILES, PieceNotes, write_pieces


class _Stream:
    """Stream into a file. ``problem``: the error of a write that failed."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.notes = PieceNotes(OF_FILES)
        self.problem: OSError | None = None

    def write(self, data: Any) -> int:
        self.notes.add(data)
        try:
            return int(self._file.write(data))
        except OSError as error:
            self.problem = error
            raise

    def tell(self) -> int:
        return int(self._file.tell())

    def flush(self) -> None:
        self._file.flush()

    def fileno(self) -> int:
        return int(self._file.fileno())


def write_file(file: Path, pieces: Sequence[Callable[[Any], Any]]) -> list[Any]:
    """Write a file of the pieces that functions write to a stream; return their results.

    Their digests are written beside it. Nothing is read again. Raises OSError.
    """
    with file.open("wb") as content:
        stream = _Stream(content)
        results = write_pieces(stream, pieces)
        _synchronize(content)
    with file.with_name(file.name + OF_FILES).open("w") as digests:
        digests.write(stream.notes.text())
        _synchronize(digests)
    return results


def _synchronize(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
