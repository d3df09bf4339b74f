"""Folders of programs."""

import contextlib
import os
import secrets
import tempfile
from collections.abc import Iterator


@contextlib.contextmanager
def scratch_folder() -> Iterator[str]:
    """Make a folder for one program; remove it afterwards, whatever the program has left in it."""
    folder = tempfile.mkdtemp(prefix="grpo-code-")
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):
            empty(folder)
            os.rmdir(folder)


def empty(folder: str) -> None:
    """Remove the contents of a folder.

    Moves nested folders up instead of descending: a program can nest deeper than paths and recursion reach.
    """
    while entries := list(os.scandir(folder)):
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
                continue
            os.chmod(entry.path, 0o700)  # the program may have made it without permissions
            for inner in list(os.scandir(entry.path)):
                if inner.is_dir(follow_symlinks=False):
                    os.chmod(inner.path, 0o700)  # a folder without write permission cannot be moved
                os.rename(inner.path, os.path.join(folder, f"{secrets.token_hex(8)}"))
            os.rmdir(entry.path)
