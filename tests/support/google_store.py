"""Google Cloud Storage for tests: fake-gcs-server, whose clients have the key of a service account."""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote

from aiohttp import web

from grpo_operator.api.names import GOOGLE_KEY_VARIABLE
from grpo_operator.api.v1alpha1.checkpoint import StoreSpec
from support.object_store import BUCKET, ObjectServer, running
from support.stand_in_google import StandInGoogle


class GoogleServer(ObjectServer):
    """fake-gcs-server, which takes requests of anybody. ``google``: issues the tokens of its clients."""

    scheme, throttles, patience, lists_uploads = "gs", 429, 40, False

    def __init__(self, folder: Path) -> None:
        self.google = StandInGoogle()
        super().__init__(folder, "fake-gcs-server", {GOOGLE_KEY_VARIABLE: self.google.key()})
        self.wrong_keys = {GOOGLE_KEY_VARIABLE: self.google.key(foreign=True)}

    def arguments(self) -> Sequence[str]:
        return [
            "-scheme", "http", "-host", "127.0.0.1", "-port", str(self.port), "-data", "",
            "-backend", "filesystem", "-filesystem-root", str(self.data), "-log-level", "error",
        ]  # fmt: skip

    def spec(self, port: int | None = None) -> StoreSpec:
        return StoreSpec(
            uri=f"gs://{BUCKET}/jobs", endpoint=f"http://127.0.0.1:{port or self.port}", secret="keys"
        )

    def put(self, folder: str, names: Iterable[str]) -> None:
        made = list(names)
        super().put(folder, made)
        for name in made:  # the server keeps what it knows of an object there
            os.setxattr(self.files / "jobs" / folder / name, "user.metadata", b"{}")

    def key(self, request: web.Request) -> str:
        named = request.query.get("name") or request.query.get("prefix")
        return named or unquote(request.raw_path.partition("?")[0].partition("/o/")[2])

    def is_part(self, request: web.Request) -> bool:
        return "upload_id" in request.query and "Content-Range" in request.headers

    def removes(self, request: web.Request) -> bool:
        return request.method == "DELETE" and "upload_id" not in request.query

    def answer(self, status: int) -> web.Response:
        return web.json_response({"error": {"code": status, "message": "injected"}}, status=status)


@contextmanager
def google_server(folder: Path) -> Iterator[GoogleServer]:
    server = GoogleServer(folder)
    try:
        with running(server):
            yield server
    finally:
        server.google.stop()
