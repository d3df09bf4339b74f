"""Folder in an engine's pod that keeps the routed experts of samples until trainers have read them."""

import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import numpy as np

from grpo_worker.data.routed_experts import RoutedExperts, Spans

_KEY = re.compile(r"[0-9a-f]{32}")
_PIECE = 1 << 20  # bytes that are sent at once
MISSING = -1  # size of a record that does not exist


class ExpertFolder:
    """Files of routed experts, one for each sample, in memory that the engine and its agent share.

    The size of the volume bounds them: when it is full, the oldest files are removed. They belong to samples
    that were cancelled or left out, unless the volume cannot hold the samples of a step.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        root.mkdir(parents=True, exist_ok=True)

    def write(self, key: str, record: bytes) -> None:
        """Write a record. Raises OSError if the whole volume is too small for it."""
        for oldest in self._oldest(len(record)):
            oldest.unlink(missing_ok=True)
            if shutil.disk_usage(self._root).free >= len(record):
                break
        temporary = self._root / f"{key}.tmp"
        try:
            temporary.write_bytes(record)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        temporary.rename(self._root / key)

    def _oldest(self, needed: int) -> list[Path]:
        """Return the files by age if there is too little room, else none."""
        if shutil.disk_usage(self._root).free >= needed:
            return []
        with os.scandir(self._root) as entries:
            return [Path(entry.path) for entry in sorted(entries, key=_age)]

    def read(
        self, references: Sequence[RoutedExperts], layers: Sequence[int], spans: Sequence[Spans]
    ) -> Iterator[bytes]:
        """Yield sizes, int64 [references], and then the bytes that ``RoutedExperts.parse`` takes, in pieces.

        ``spans``: of each reference. The size of a record that does not exist is ``MISSING``. Memory is
        bounded: pieces are small, and records that are dropped meanwhile are read to their end.
        """
        with ExitStack() as stack:
            files = [self._open(reference.key, stack) for reference in references]
            ranges = [r.ranges(layers, own) for r, own in zip(references, spans, strict=True)]
            sizes = [
                MISSING if file is None else sum(length for _, length in own)
                for file, own in zip(files, ranges, strict=True)
            ]
            yield np.array(sizes, np.int64).tobytes()
            for file, own in zip(files, ranges, strict=True):
                if file is not None:
                    yield from _pieces(file, own)

    def _open(self, key: str, stack: ExitStack) -> BinaryIO | None:
        try:
            return stack.enter_context(self._file(key).open("rb"))
        except FileNotFoundError:
            return None

    def drop(self, keys: Iterable[str]) -> None:
        """Remove the records of samples that trainers have read."""
        for key in keys:
            self._file(key).unlink(missing_ok=True)

    def _file(self, key: str) -> Path:
        if not _KEY.fullmatch(key):
            raise ValueError(f"{key!r} is no key of routed experts")
        return self._root / key


def _age(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat().st_mtime_ns
    except FileNotFoundError:  # dropped meanwhile
        return 0


def _pieces(file: BinaryIO, ranges: Sequence[tuple[int, int]]) -> Iterator[bytes]:
    """Yield byte ranges of a file, several small ones at once."""
    parts, size = [], 0
    for start, length in ranges:
        file.seek(start)
        parts.append(file.read(length))
        size += length
        if size >= _PIECE:
            yield b"".join(parts)
            parts, size = [], 0
    yield b"".join(parts)
