"""Files of a web server: one, or what fsspec finds in the links of a directory's page."""

from collections.abc import Iterator
from pathlib import PurePosixPath
from urllib.parse import unquote, urlsplit

import aiohttp
import fsspec
import httpx

from grpo_worker.data.remote.errors import RefusedError, translated
from grpo_worker.data.remote.source import RemoteFile

# Bounds waiting for the next bytes, however long a file takes.
_SILENCE_SECONDS = 60.0
_UNCOMPRESSED = {"accept-encoding": "identity"}  # sizes and offsets are those of the file


class WebSource:
    """A directory when the URI ends with a slash, else a single file."""

    revision = None

    def __init__(self, uri: str, token: str | None) -> None:
        self._uri, self._token = uri, token

    def files(self) -> list[RemoteFile]:
        with translated(self._token):
            found = self._listed() if self._uri.endswith("/") else [self._uri]
            if not found:
                raise RefusedError("the page has no link to a file below it: correct uri")
            return [self._file(address) for address in found]

    def read(self, file: RemoteFile, offset: int) -> Iterator[bytes]:
        yield from stream(file.address, self._token, offset)

    def _listed(self) -> list[str]:
        silence = aiohttp.ClientTimeout(total=None, sock_connect=_SILENCE_SECONDS, sock_read=_SILENCE_SECONDS)
        client = {"headers": _headers(self._token), "timeout": silence, "trust_env": True}
        files = fsspec.filesystem("http", client_kwargs=client, skip_instance_cache=True)
        files.ls(self._uri)  # says what is wrong, where find() returns nothing
        return sorted(set(files.find(self._uri)))

    def _file(self, address: str) -> RemoteFile:
        own = unquote(urlsplit(address).path)
        base = unquote(urlsplit(self._uri).path)
        path = own.removeprefix(base) if self._uri.endswith("/") else PurePosixPath(own).name
        headers = _headers(self._token)
        reply = httpx.head(address, headers=headers, follow_redirects=True, timeout=_SILENCE_SECONDS)
        if reply.status_code in (405, 501):  # a server without HEAD
            return RemoteFile(path, address, None)
        reply.raise_for_status()
        size = reply.headers.get("content-length")
        version = reply.headers.get("etag") or reply.headers.get("last-modified") or ""
        return RemoteFile(path, address, None if size is None else int(size), version)


def stream(address: str, token: str | None, offset: int) -> Iterator[bytes]:
    """The bytes of a URL from ``offset`` on.

    Raises RefusedError or InterruptedFetchError.
    """
    headers = _headers(token) | ({"range": f"bytes={offset}-"} if offset else {})
    with (
        translated(token),
        httpx.stream(
            "GET", address, headers=headers, follow_redirects=True, timeout=_SILENCE_SECONDS
        ) as reply,
    ):
        reply.raise_for_status()
        skip = 0 if reply.status_code == httpx.codes.PARTIAL_CONTENT else offset
        for chunk in reply.iter_raw():
            yield chunk[skip:]
            skip = max(0, skip - len(chunk))


def _headers(token: str | None) -> dict[str, str]:
    return _UNCOMPRESSED | ({"authorization": f"Bearer {token}"} if token else {})
