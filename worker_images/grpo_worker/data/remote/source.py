"""What a ``uri`` of ``spec.model.volume`` or ``spec.data.volume`` names."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

from grpo_operator.api.volumes import VolumeSpec


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
    """A remote directory, or a single file. Everything raises RefusedError or InterruptedFetchError."""

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


def open_source(spec: VolumeSpec, token: str | None, revision: str | None = None) -> Source:
    """The source of ``spec.uri``. ``revision``: the commit of a hub's repository that an earlier fetch began.

    Raises RefusedError.
    """
    assert spec.uri is not None
    scheme = urlsplit(spec.uri).scheme
    # Each of them imports libraries that take seconds.
    if scheme == "hf":
        from grpo_worker.data.remote.hub import HubSource

        return HubSource(spec.uri, spec.endpoint, token, revision)
    if scheme in ("http", "https"):
        from grpo_worker.data.remote.web import WebSource

        return WebSource(spec.uri, token)
    from grpo_worker.data.remote.objects import object_store

    return object_store(spec.uri)
