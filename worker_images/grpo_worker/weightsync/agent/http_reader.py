"""HTTP reader: GET requests into existing memory, over connections that stay open."""

import http.client
import json
import threading
import time
from collections.abc import Iterator, Set
from contextlib import contextmanager
from urllib.parse import urlsplit

from grpo_worker.common import tls
from grpo_worker.common.auth import pair_headers

_CONNECT_SECONDS = 10.0
_MOST_OF_REASON = 4096  # bytes


class FetchError(RuntimeError):
    """A source did not deliver; the message names its URL."""


class UnreachableError(FetchError):
    """No connection to a source. ``sources``: base URLs of all those to which there is none."""

    def __init__(self, text: str, sources: Set[str] = frozenset()) -> None:
        super().__init__(text)
        self.sources = sources


class HttpReader:
    """Reads from the trainers' sidecars. Thread-safe: each thread has its own connection to each host.

    ``timeout``: seconds without a byte.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._verify = tls.pair()
        self._of_thread = threading.local()

    @contextmanager
    def get(self, url: str, part: tuple[int, int] | None = None) -> Iterator["Body"]:
        """Open a GET request. ``part``: first byte wanted, and the byte after the last.

        Raises FetchError, and UnreachableError if there is no connection.
        """
        target = urlsplit(url)
        path = f"{target.path}?{target.query}" if target.query else target.path
        fields = pair_headers() | ({"Range": f"bytes={part[0]}-{part[1] - 1}"} if part else {})
        response = self._open(url, target.netloc, path, fields)
        try:
            if response.status != (206 if part else 200):
                raise FetchError(f"{url}: HTTP {response.status} {_reason(response)}".rstrip())
            if part and response.length != part[1] - part[0]:
                raise FetchError(f"{url}: {response.length} bytes, expected {part[1] - part[0]}")
            yield Body(url, response, self._timeout)
        finally:
            if not response.isclosed():  # not read to its end: the connection cannot be used again
                self._connections.pop(target.netloc).close()
                response.close()

    @property
    def _connections(self) -> dict[str, http.client.HTTPConnection]:
        if not hasattr(self._of_thread, "connections"):
            self._of_thread.connections = {}
        found: dict[str, http.client.HTTPConnection] = self._of_thread.connections
        return found

    def _open(self, url: str, host: str, path: str, fields: dict[str, str]) -> http.client.HTTPResponse:
        reused = host in self._connections
        try:
            return self._request(url, host, path, fields)
        except (OSError, http.client.HTTPException) as error:
            self._connections.pop(host).close()
            if not reused:
                raise FetchError(f"{url}: {error!r}") from error
        return self._open(url, host, path, fields)  # the host had closed the idle connection

    def _request(self, url: str, host: str, path: str, fields: dict[str, str]) -> http.client.HTTPResponse:
        connection = self._connections.get(host)
        if connection is None:
            connection = self._connection(host)
            try:
                connection.connect()
            except OSError as error:
                raise UnreachableError(f"{url}: {error!r}") from error
            connection.sock.settimeout(self._timeout)
            self._connections[host] = connection
        connection.request("GET", path, headers=fields)
        return connection.getresponse()

    def _connection(self, host: str) -> http.client.HTTPConnection:
        if isinstance(self._verify, bool):
            return http.client.HTTPConnection(host, timeout=_CONNECT_SECONDS)
        return http.client.HTTPSConnection(host, timeout=_CONNECT_SECONDS, context=self._verify)


def _reason(response: http.client.HTTPResponse) -> str:
    """Return the error in the body of a response."""
    try:
        return str(json.loads(response.read(_MOST_OF_REASON))["error"])
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return ""


class Body:
    """The body of a response."""

    def __init__(self, url: str, response: http.client.HTTPResponse, timeout: float) -> None:
        self._url = url
        self._response = response
        self._timeout = timeout

    def read(self) -> bytes:
        """Return the whole body. Raises FetchError."""
        try:
            return self._response.read()
        except (OSError, http.client.HTTPException) as error:
            raise FetchError(f"{self._url}: {error!r}") from error

    def fill(self, to: memoryview, deadline: float | None = None) -> None:
        """Fill ``to`` with the next bytes of the body.

        Raises FetchError at its end, when no byte arrives for the reader's timeout, or at ``deadline`` (of
        time.monotonic()) even if bytes still arrive.
        """
        length = 0
        try:
            while length < len(to):
                # readinto1 returns as soon as bytes have arrived; readinto would wait until ``to`` is full.
                got = self._response.fp.readinto1(to[length:]) if self._response.fp else 0
                length += got
                self._count(got)
                if not got:
                    raise FetchError(f"{self._url}: {length} more bytes, expected {len(to)}")
                if deadline is not None and time.monotonic() > deadline and length < len(to):
                    raise FetchError(f"{self._url}: {length} of {len(to)} bytes within the time limit")
        except TimeoutError as error:
            text = f"{length} of {len(to)} bytes, then none for {self._timeout:g} s"
            raise FetchError(f"{self._url}: {text}") from error
        except (OSError, http.client.HTTPException) as error:
            raise FetchError(f"{self._url}: {error!r}") from error

    def header(self, name: str) -> str:
        """Return a field of the response's header; "" without one."""
        return self._response.headers.get(name, "")

    @property
    def length(self) -> int:
        """Bytes that are still to come."""
        return self._response.length or 0

    def _count(self, got: int) -> None:
        """Do what HTTPResponse.readinto does: end the response with its last byte."""
        if self._response.length is not None:
            self._response.length -= got
            if self._response.length == 0:
                self._response.close()
