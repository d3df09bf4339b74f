"""Source for object stores, through the fsspec driver of the URI's scheme."""

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import fsspec
from fsspec.registry import known_implementations

from grpo_worker.volumes.remote.errors import PermanentFetchError, translated
from grpo_worker.volumes.remote.remote_file import RemoteFile

_CHUNK = 16 << 20  # bytes per request


def object_store(uri: str) -> "ObjectSource":
    """Return the source of ``uri``, whose driver finds credentials itself. Raises PermanentFetchError."""
    scheme = urlsplit(uri).scheme
    try:
        with translated(None):
            files, path = fsspec.core.url_to_fs(uri)
    except PermanentFetchError as error:
        if not isinstance(error.__cause__, ImportError):
            raise
        driver = known_implementations[scheme]["class"].partition(".")[0]
        raise PermanentFetchError(
            f"the image has no driver for {scheme}://: add the Python package {driver} to spec.image"
        ) from error
    return ObjectSource(files, path)


class ObjectSource:
    """A prefix or a single object in an object store. ``files``: an fsspec filesystem."""

    revision = None

    def __init__(self, files: Any, path: str) -> None:
        self._files, self._path = files, path.rstrip("/")

    def files(self) -> list[RemoteFile]:
        """Return all objects below the prefix."""
        with translated(None):
            objects = self._files.find(self._path, detail=True)
        if not objects:
            raise PermanentFetchError("there is no such file or directory: correct uri")
        return [self._file(name, info) for name, info in sorted(objects.items()) if not name.endswith("/")]

    def read(self, file: RemoteFile, offset: int) -> Iterator[bytes]:
        """Return the bytes of an object from ``offset`` on."""
        with (
            translated(None),
            self._files.open(file.address, "rb", block_size=_CHUNK, cache_type="none") as handle,
        ):
            handle.seek(offset)
            while chunk := handle.read(_CHUNK):
                yield chunk

    def _file(self, name: str, info: dict[str, Any]) -> RemoteFile:
        path = name.removeprefix(self._path).lstrip("/") or PurePosixPath(name).name
        version = info.get("ETag") or info.get("etag") or info.get("mtime") or ""
        return RemoteFile(path, name, info.get("size"), str(version))
