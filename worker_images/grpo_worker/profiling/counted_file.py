"""Files whose bytes count as progress."""

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo_worker.common.repeated import repeated
from grpo_worker.profiling.progress import BACKGROUND, PROGRESS, READ, WRITTEN

_LOOK_SECONDS = 1.0


class _CountedRaw(io.FileIO):
    def readinto(self, buffer: Any, /) -> int | None:
        count = super().readinto(buffer)
        PROGRESS.add(READ, count or 0)
        return count

    def readall(self) -> bytes:
        data = super().readall()
        PROGRESS.add(READ, len(data))
        return data


def open_counted(path: Path) -> io.BufferedReader:
    """Open a file for reading; its bytes count as progress while they are read."""
    return io.BufferedReader(_CountedRaw(path), 2**20)


@contextmanager
def growing(path: Path) -> Iterator[None]:
    """Count the growth of a file, while one call of a library writes it in a thread beside the calls."""
    seen = 0

    def look() -> None:
        nonlocal seen
        size = path.stat().st_size if path.is_file() else 0
        if size > seen:
            BACKGROUND.add(WRITTEN, size - seen)
            seen = size

    try:
        with repeated(look, _LOOK_SECONDS, f"growth of {os.path.basename(path)}"):
            yield
    finally:
        look()
