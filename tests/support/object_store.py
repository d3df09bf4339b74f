"""Real servers of object stores, whose objects are plain files."""

import os
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar
from unittest.mock import patch

import httpx
from aiohttp import web

from grpo_devcluster.gobuild import binary, build_all
from grpo_operator.api.v1alpha1.checkpoint import StoreSpec
from grpo_worker.common.store_path import JobFolder, StorePath
from support.engine_server import free_port

KEYS = {"AWS_ACCESS_KEY_ID": "grpo", "AWS_SECRET_ACCESS_KEY": "a-secret-of-tests"}
BUCKET = "runs"
_OWNER = {"ROOT_ACCESS_KEY": KEYS["AWS_ACCESS_KEY_ID"], "ROOT_SECRET_KEY": KEYS["AWS_SECRET_ACCESS_KEY"]}
Server = TypeVar("Server", bound="ObjectServer")


class ObjectServer(ABC):
    """A server's process. ``files``: folder of the bucket.

    ``keys``: what clients have in the environment. ``wrong_keys``: with which they are refused.
    ``throttles``: status of an answer to a client that asks too often. ``patience``: seconds in which the
    client tries a request again. ``lists_uploads``: whether the server tells of uploads that were not ended.
    """

    scheme: str
    wrong_keys: dict[str, str]
    throttles: int
    patience: int
    lists_uploads: bool

    def __init__(self, folder: Path, component: str, keys: dict[str, str]) -> None:
        build_all([component])
        self.program, self.keys, self.port = str(binary(component)), keys, free_port()
        self.data = folder / "data"
        self.files = self.data / BUCKET
        self.files.mkdir(parents=True)

    @abstractmethod
    def arguments(self) -> Sequence[str]:
        """Return the arguments of the server's program."""

    @abstractmethod
    def spec(self, port: int | None = None) -> StoreSpec:
        """Return the store of jobs on the server, or on a proxy before it."""

    @abstractmethod
    def key(self, request: web.Request) -> str:
        """Return the key of the object that a request is about, or the prefix of a listing."""

    @abstractmethod
    def is_part(self, request: web.Request) -> bool:
        """Return whether a request has a part of an upload of several."""

    @abstractmethod
    def removes(self, request: web.Request) -> bool:
        """Return whether a request removes objects."""

    @abstractmethod
    def answer(self, status: int) -> web.Response:
        """Return an answer that the server could give."""

    def start(self) -> None:
        self._process = subprocess.Popen(
            [self.program, *self.arguments()],
            env=os.environ | _OWNER,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                httpx.get(f"http://127.0.0.1:{self.port}", timeout=1)
            except httpx.HTTPError:
                assert self._process.poll() is None, f"the {self.scheme} server has ended"
                time.sleep(0.05)
            else:
                return
        raise AssertionError(f"the {self.scheme} server does not answer")

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def put(self, folder: str, names: Iterable[str]) -> None:
        """Make many small objects of a job without requests; names are relative to its folder."""
        for name in names:
            file = self.files / "jobs" / folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("{}")

    def folder(self, name: str) -> StorePath:
        """Return the folder of a job in the bucket."""
        return JobFolder.of(self.spec(), Path("/store", name)).store

    def objects(self, folder: str) -> list[str]:
        """Return the names of the objects of a job, relative to its folder."""
        root = self.files / "jobs" / folder
        return sorted(str(file.relative_to(root)) for file in root.rglob("*") if file.is_file())


class S3Server(ObjectServer):
    """versitygw."""

    scheme, throttles, patience, lists_uploads = "s3", 503, 25, True
    wrong_keys = KEYS | {"AWS_SECRET_ACCESS_KEY": "another"}
    _ERROR = """<?xml version="1.0" encoding="UTF-8"?>
<Error><Code>{code}</Code><Message>injected</Message><RequestId>1</RequestId></Error>"""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "versitygw", KEYS)
        self._metadata = folder / "metadata"
        self._metadata.mkdir()

    def arguments(self) -> Sequence[str]:
        return [
            "--quiet", "--keep-alive", "--port", f"127.0.0.1:{self.port}",
            "posix", "--sidecar", str(self._metadata), str(self.data),
        ]  # fmt: skip

    def spec(self, port: int | None = None) -> StoreSpec:
        endpoint = f"http://127.0.0.1:{port or self.port}"
        return StoreSpec(uri=f"s3://{BUCKET}/jobs", endpoint=endpoint, region="us-east-1", secret="keys")

    def key(self, request: web.Request) -> str:
        return request.path.removeprefix(f"/{BUCKET}/")

    def is_part(self, request: web.Request) -> bool:
        return "partNumber" in request.query

    def removes(self, request: web.Request) -> bool:
        return request.method == "POST" and "delete" in request.query

    def answer(self, status: int) -> web.Response:
        text = self._ERROR.format(code="SlowDown" if status == self.throttles else "InternalError")
        return web.Response(status=status, text=text, content_type="application/xml")


@contextmanager
def running(server: Server) -> Iterator[Server]:
    """Start a server, with its keys in the environment, and stop it."""
    server.start()
    try:
        with patch.dict(os.environ, server.keys):
            yield server
    finally:
        server.stop()


@contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    with running(S3Server(folder)) as server:
        yield server
