"""Lines that a process hands to another one of its pod, through a file of limited size."""

import os
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

PART_BYTES = 256 << 10  # of the file; beside it lies FILE.1 with what was before
_LINE_BYTES = 64 << 10  # a longer line is split


class LinesWriter:
    """Appends lines to a file. What the disk does not take is lost: the writer has other work to do."""

    def __init__(self, file: Path, part_bytes: int = PART_BYTES) -> None:
        self._file, self._part_bytes = file, part_bytes

    def write(self, line: bytes) -> None:
        """Append a line, which ends with a line break."""
        with suppress(OSError):
            if self._file.exists() and self._file.stat().st_size + len(line) > self._part_bytes:
                os.replace(self._file, f"{self._file}.1")
            with self._file.open("ab", buffering=0) as handle:
                handle.write(line)


class LinesReader:
    """Reads the lines of a LinesWriter of the same pod, from the start of the file on."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._handle: BinaryIO | None = None
        self._begun = b""  # line whose end is not written yet

    def read(self) -> list[str]:
        """Return the lines that were completed since the last call. Raises OSError."""
        found = self._begun + self._rest()
        if self._is_replaced():
            found += self._rest()  # what was written before the writer replaced the file
            self._open()
            found += self._rest()
        *lines, self._begun = found.split(b"\n")
        if len(self._begun) > _LINE_BYTES:
            lines, self._begun = [*lines, self._begun], b""
        return [line.decode(errors="replace") for line in lines]

    def _rest(self) -> bytes:
        return self._handle.read() if self._handle else b""

    def _is_replaced(self) -> bool:
        """Return whether the file is not the one that is open."""
        if not self._file.exists():
            return False
        return self._handle is None or not os.path.samestat(
            os.fstat(self._handle.fileno()), self._file.stat()
        )

    def _open(self) -> None:
        if self._handle:
            self._handle.close()
        self._handle = self._file.open("rb")
