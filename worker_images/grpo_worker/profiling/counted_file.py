"""Files whose bytes count as progress."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from grpo_worker.common.repeated import repeated
from grpo_worker.profiling.progress import BACKGROUND, WRITTEN

_LOOK_SECONDS = 1.0


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
