"""Atomic writes of small files that a crash of the host or of the store's server does not undo."""

import errno
import os
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
    with temporary.open("w") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())
    rename(temporary, path)


def rename(temporary: Path, path: Path) -> None:
    """Rename a file within its folder, and wait until the folder's new entry is on the store."""
    temporary.rename(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Wait until names that were added, renamed or removed in a folder are on the store."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # from file systems that have no such call for folders
            raise
    finally:
        os.close(descriptor)
