"""Source for web servers: a single file, or all files that the pages of a directory link to."""

from collections.abc import Iterator
from pathlib import PurePosixPath
from urllib.parse import unquote, urlsplit

import aiohttp
import fsspec
import httpx

from grpo_worker.volumes.remote.errors import PermanentFetchError, translated
from grpo_worker.volumes.remote.remote_file import RemoteFile

# Timeout of a connection and of the next bytes; the duration of a whole file is not limited.
_IDLE_SECONDS = 60.0
_UNCOMPRESSED = {"accept-encoding": "identity"}  # sizes and offsets are those of the file


class WebSource:
    """A directory when the URI ends with a slash, else a single file."""

    revision = None

    def __init__(self, uri: str, token: str | None) -> None:
        self._uri, self._token = uri, token

    def files(self) -> list[RemoteFile]:
        """Return the file, or all files below the directory."""
        with translated(self._token):
            addresses = self._listed() if self._uri.endswith("/") else [self._uri]
            if not addresses:
                raise PermanentFetchError("the page has no link to a file below it: correct uri")
            return [self._file(address) for address in addresses]

    def read(self, file: RemoteFile, offset: int) -> Iterator[bytes]:
        """Return the bytes of a file from ``offset`` on."""
        yield from stream(file.address, self._token, offset)

    def _listed(self) -> list[str]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_IDLE_SECONDS, sock_read=_IDLE_SECONDS)
        client = {"headers": _headers(self._token), "timeout": timeout, "trust_env": True}
        files = fsspec.filesystem("http", client_kwargs=client, skip_instance_cache=True)
        pages, addresses, seen = [self._uri], set[str](), {self._uri}
        # Not find(), which silently skips the directories that it cannot read.
        while pages:
            new = {address for address in files.ls(pages.pop(), detail=False) if self._is_below(address)}
            pages += [address for address in new - seen if address.endswith("/")]
            addresses |= {address for address in new if not address.endswith("/")}
            seen |= new
        return sorted(addresses)

    def _is_below(self, address: str) -> bool:
        """Return whether an address is below the URI; pages also link to sorted views of themselves."""
        parts = urlsplit(address)
        if parts.query or parts.fragment or {".", ".."} & set(parts.path.split("/")):
            return False
        return address.startswith(self._uri)

    def _file(self, address: str) -> RemoteFile:
        own = unquote(urlsplit(address).path)
        base = unquote(urlsplit(self._uri).path)
        path = own.removeprefix(base) if self._uri.endswith("/") else PurePosixPath(own).name
        headers = _headers(self._token)
        reply = httpx.head(address, headers=headers, follow_redirects=True, timeout=_IDLE_SECONDS)
        if reply.status_code in (405, 501):  # a server without HEAD
            return RemoteFile(path, address, None)
        reply.raise_for_status()
        size = reply.headers.get("content-length")
        version = reply.headers.get("etag") or reply.headers.get("last-modified") or ""
        return RemoteFile(path, address, None if size is None else int(size), version)


def stream(address: str, token: str | None, offset: int) -> Iterator[bytes]:
    """Return the bytes of a URL from ``offset`` on.

    Raises PermanentFetchError or TransientFetchError.
    """
    headers = _headers(token) | ({"range": f"bytes={offset}-"} if offset else {})
    with (
        translated(token),
        httpx.stream("GET", address, headers=headers, follow_redirects=True, timeout=_IDLE_SECONDS) as reply,
    ):
        reply.raise_for_status()
        skip = 0 if reply.status_code == httpx.codes.PARTIAL_CONTENT else offset
        for chunk in reply.iter_raw():
            yield chunk[skip:]
            skip = max(0, skip - len(chunk))


def _headers(token: str | None) -> dict[str, str]:
    return _UNCOMPRESSED | ({"authorization": f"Bearer {token}"} if token else {})
