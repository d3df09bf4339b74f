"""A trainer's sidecar before whose answers a test does harm."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool

from grpo_worker.weightsync.trainer.agent import application
from support.engine_server import serve_app
from support.late_engine import WORLD


class GatedTrainers:
    """Serves what is published in ``root``. ``reads``: ranges of blobs that were asked for, in bytes.

    ``sources``: rank -> URL.
    """

    def __init__(self, root: Path) -> None:
        self._app = application(root)
        self._call: Callable[[], Any] | None = None
        self._number = 0
        self._lock = threading.Lock()
        self.reads: list[int] = []
        self.sources = dict.fromkeys(range(WORLD), serve_app(self))

    @contextmanager
    def before_read(self, number: int, call: Callable[[], Any]) -> Iterator[None]:
        """Call ``call`` before the answer to the read of that number, which must come; all others wait."""
        self._call, self._number, self.reads = call, number, []
        try:
            yield
            assert len(self.reads) >= number, f"{len(self.reads)} reads"
        finally:
            self._call = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"].endswith(".bin"):
            await run_in_threadpool(self._read, dict(scope["headers"]).get(b"range", b"bytes=0-0"))
        await self._app(scope, receive, send)

    def _read(self, asked: bytes) -> None:
        first, last = asked.decode().removeprefix("bytes=").split("-")
        with self._lock:
            self.reads.append(int(last) - int(first) + 1)
            if self._call is not None and len(self.reads) == self._number:
                self._call()
