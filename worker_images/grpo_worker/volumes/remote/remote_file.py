"""What every remote directory tells, and how its files are read."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """``path``: relative to the directory that is fetched. ``address``: what the source reads it by.

    ``version`` changes with the content; "": the source does not tell. ``sha256``: of the content, if known.
    """

    path: str
    address: str
    size: int | None
    version: str = ""
    sha256: str | None = None


class Source(Protocol):
    """A remote directory, or a single file. Everything raises PermanentFetchError or TransientFetchError."""

    @property
    def revision(self) -> str | None:
        """The commit of a hub's repository; None elsewhere."""
        ...

    def files(self) -> list[RemoteFile]:
        """All files below the directory."""
        ...

    def read(self, file: RemoteFile, offset: int) -> Iterator[bytes]:
        """The bytes of a file from ``offset`` on."""
        ...
