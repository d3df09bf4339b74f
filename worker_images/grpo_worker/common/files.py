"""Atomic writes of small files that a crash of the host or of the store's server does not undo."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from upath import UPath


def write_text(
    path: "Path | UPath", text: str, draft: str | None = None, check: Callable[[], None] = lambda: None
) -> None:
    """Write ``path`` so that a reader finds all of the text or what was there before.

    A file is renamed from a temporary one, an object of an object store replaced in one request. ``draft``:
    name of the temporary file, its own for each writer; default: that of ``path`` with the suffix ``.tmp``.
    ``check``: called right before the file appears; it stays away if this raises an error.
    """
    if not isinstance(path, Path):
        check()
        path.fs.pipe_file(path.path, text.encode())
        return
    temporary = path.with_name(draft) if draft else path.with_suffix(".tmp")
    with temporary.open("w") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())
    check()
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
