"""Atomic writes of small files."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from upath import UPath


def write_text(path: "Path | UPath", text: str, suffix: str = ".tmp") -> None:
    """Write ``path`` atomically, by renaming a temporary file with ``suffix``, its own for each writer.

    An object of an object store is replaced in one request.
    """
    if not isinstance(path, Path):
        path.fs.pipe_file(path.path, text.encode())
        return
    temporary = path.with_suffix(suffix)
    temporary.write_text(text)
    temporary.rename(path)
