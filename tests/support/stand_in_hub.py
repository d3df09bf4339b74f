"""A stand-in for the Hugging Face hub: its routes that huggingface_hub and the fetch call, over real HTTP.

It can refuse callers without a token, cut connections, send bytes slowly, and answer with a status.
"""

import hashlib
import json
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import unquote, urlsplit

COMMIT = hashlib.sha1(b"commit").hexdigest()


@dataclass
class StandInHub:
    """One repository, ``name``, of models or (``kind``) datasets. Files of ``large`` are stored as LFS files.

    ``cut``: bytes after which the connection ends, once for each entry. ``failures``: statuses of the next
    answers. ``pause``: seconds between two pieces of a file. ``ranges``: honour Range. ``entries``:
    the list of files that it gives, if not that of ``files``. ``broken``: a path with status 503.
    """

    files: dict[str, bytes]
    name: str = "org/model"
    kind: str = "models"
    token: str | None = None
    large: frozenset[str] = frozenset()
    cut: list[int] = field(default_factory=list)
    failures: list[int] = field(default_factory=list)
    pause: float = 0.0
    address: str = "127.0.0.1"
    ranges: bool = True
    entries: list[dict[str, Any]] | None = None
    broken: str | None = None
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)  # method, path, Range

    def __enter__(self) -> Self:
        hub = self

        class Handler(_Handler):
            def do_GET(self) -> None:
                hub.answer(self)

            def do_HEAD(self) -> None:
                hub.answer(self)

        self._server = ThreadingHTTPServer((self.address, 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://{self.address}:{self._server.server_port}"

    def reads(self, file: str) -> list[str | None]:
        """Return the Range header of each request for a file."""
        return [value for method, path, value in self.requests if method == "GET" and path.endswith(file)]

    def answer(self, call: "_Handler") -> None:
        path, range_header = unquote(urlsplit(call.path).path), call.headers.get("range")
        self.requests.append((call.command, path, range_header))
        api, files = f"/api/{self.kind}/{self.name}", ("/datasets" if self.kind == "datasets" else "")
        resolve = f"{files}/{self.name}/resolve/{COMMIT}/"
        if self.failures:
            call.reply(self.failures.pop(0), b"later")
        elif path == self.broken:
            call.reply(503, b"later")
        elif self.token and call.headers.get("authorization") != f"Bearer {self.token}":
            call.reply(401, b"Invalid username or password.")
        elif path in (api, f"{api}/revision/main"):
            call.reply(200, json.dumps({"id": self.name, "sha": COMMIT}).encode())
        elif path == f"{api}/tree/{COMMIT}":
            entries = [self._entry(*item) for item in self.files.items()]
            call.reply(200, json.dumps(self.entries or entries).encode())
        elif path.startswith(resolve) and path.removeprefix(resolve) in self.files:
            self._send(call, self.files[path.removeprefix(resolve)], range_header)
        elif path.startswith("/files/") and path.endswith("/"):
            self._send_page(call, path.removeprefix("/files/"))
        elif path.startswith("/files/") and path.removeprefix("/files/") in self.files:
            self._send(call, self.files[path.removeprefix("/files/")], range_header)
        else:
            call.reply(404, b"Not Found", {"x-error-code": "RepoNotFound"})

    def _send_page(self, call: "_Handler", directory: str) -> None:
        """Send a directory index like Apache's, with links that sort it and one to the parent directory."""
        below = [name.removeprefix(directory) for name in self.files if name.startswith(directory)]
        names = sorted({head + slash for head, slash, _ in (name.partition("/") for name in below)})
        above = "/files/" if directory else "/"
        links = "".join(f'<a href="{to}">{to}</a>' for to in ("?C=N;O=D", "?C=M;O=A", above, "./", *names))
        call.reply(200 if below else 404, links.encode(), {"content-type": "text/html;charset=UTF-8"})

    def _entry(self, name: str, content: bytes) -> dict[str, Any]:
        entry = {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
        if name in self.large:
            lfs = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
            entry["lfs"] = lfs
        return entry

    def _send(self, call: "_Handler", content: bytes, range_header: str | None) -> None:
        range_header = range_header if self.ranges else None
        begin = int(range_header.removeprefix("bytes=").rstrip("-")) if range_header else 0
        rest, more = content[begin:], {"etag": f'"{hashlib.sha1(content).hexdigest()}"'}
        if call.command == "HEAD" or not (self.cut or self.pause):
            call.reply(206 if range_header else 200, rest, more)
            return
        end = self.cut.pop(0) if self.cut else len(rest)
        call.head(206 if range_header else 200, len(rest), more)
        for start in range(0, end, 4096):
            call.wfile.write(rest[start : min(start + 4096, end)])
            time.sleep(self.pause)
        call.close_connection = True


class _Handler(BaseHTTPRequestHandler):
    def reply(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.head(status, len(body), headers or {})
        if self.command != "HEAD":
            self.wfile.write(body)

    def head(self, status: int, length: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"content-length": str(length), **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""
