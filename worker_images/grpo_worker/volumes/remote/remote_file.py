"""Interface of remote directories, and checks of their files."""

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Protocol

from grpo_worker.volumes.remote.errors import PermanentFetchError, TransientFetchError


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a source.

    ``path``: relative to the fetched directory. ``address``: identifies the file for its source. ``version``:
    changes with the content, "" if unknown. ``sha256``: of the content, if known.
    """

    path: str
    address: str
    size: int | None
    version: str = ""
    sha256: str | None = None


class Source(Protocol):
    """A remote directory or single file.

    All methods raise PermanentFetchError or TransientFetchError.
    """

    @property
    def revision(self) -> str | None:
        """The commit of a hub's repository; None for other sources."""
        ...

    def files(self) -> list[RemoteFile]:
        """Return all files below the directory."""
        ...

    def read(self, file: RemoteFile, offset: int) -> Iterator[bytes]:
        """Return the bytes of a file from ``offset`` on."""
        ...


def check_names(files: list[RemoteFile]) -> None:
    """Check that each file has a distinct path inside the directory. Raises PermanentFetchError."""
    paths = [PurePosixPath(file.path) for file in files]
    for path, number in Counter(paths).items():
        if path.is_absolute() or ".." in path.parts:
            raise PermanentFetchError(f"it names the file {str(path)!r}, which is outside of its directory")
        if not path.parts or number > 1:
            raise PermanentFetchError(
                f"it names {number} files {str(path)!r}: correct uri, or give files names that differ"
            )


def named_errors(file: RemoteFile, chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Return the chunks; errors of the source then name the file."""
    try:
        yield from chunks
    except (PermanentFetchError, TransientFetchError) as error:
        raise type(error)(f"{file.path}: {error}") from error


def check_content(fetched: Path, file: RemoteFile) -> None:
    """Check size and digest of a fetched file; remove it and raise TransientFetchError if they differ."""
    size = fetched.stat().st_size
    if file.size is not None and size != file.size:
        fetched.unlink()
        raise TransientFetchError(f"{file.path}: received {size} bytes of {file.size}")
    if file.sha256 is None:
        return
    with fetched.open("rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
    if digest != file.sha256:
        fetched.unlink()
        raise TransientFetchError(
            f"{file.path}: its content has sha256 {digest}, but the hub reports {file.sha256}"
        )
