"""File reader: reads files of a store that may stop answering, with the deadlines of HttpReader."""

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from grpo_worker.weightsync.agent.http_reader import FetchError

T = TypeVar("T")
_STEP = 1 << 20  # bytes of one read
_THREADS = 8
_LOOK_SECONDS = 1.0  # between looks whether a read that takes long should go on


def reading_threads() -> ThreadPoolExecutor:
    """Return threads for FileReader. Reads that hang keep theirs, and no others are started."""
    return ThreadPoolExecutor(_THREADS, thread_name_prefix="store")


class FileReader:
    """Reads in ``threads``: a read of a network file system that hangs cannot be ended, only left behind.

    ``timeout``: seconds of each read. ``cancelled``: returns why reading must end; "": it need not.
    """

    def __init__(self, threads: ThreadPoolExecutor, timeout: float, cancelled: Callable[[], str]) -> None:
        self._threads = threads
        self._timeout = timeout
        self._cancelled = cancelled

    def run(self, what: str, call: Callable[[], T]) -> T:
        """Return the result of a short call. ``what``: it reads. Raises FetchError."""
        future, deadline = self._threads.submit(call), time.monotonic() + self._timeout
        while not wait([future], _LOOK_SECONDS).done:
            problem = self._cancelled()
            if not problem and time.monotonic() > deadline:
                problem = f"no answer of the store for {self._timeout:g} s"
            if problem:
                future.cancel()
                raise FetchError(f"{what}: {problem}")
        try:
            return future.result()
        except (OSError, ValueError) as error:
            raise FetchError(f"{what}: {error}") from error

    @contextmanager
    def get(self, url: str, part: tuple[int, int]) -> Iterator["FileBody"]:
        """Open a file. ``url``: its path. ``part``: first byte wanted, and the byte after the last."""
        if problem := self._cancelled():
            raise FetchError(f"{url}: {problem}")
        yield FileBody(self, url, self.run(url, lambda: _OpenFile(url)), part[0])


class _OpenFile:
    """An open file, which is closed when nobody uses it any more: also not a read that was left behind."""

    def __init__(self, path: str) -> None:
        self._number = os.open(path, os.O_RDONLY)

    def read(self, first: int, nbytes: int) -> bytes:
        return os.pread(self._number, nbytes, first)

    def __del__(self) -> None:
        if hasattr(self, "_number"):
            os.close(self._number)


class FileBody:
    """The bytes of a file from byte ``at`` on."""

    def __init__(self, reader: FileReader, path: str, file: _OpenFile, at: int) -> None:
        self._reader, self._path, self._file, self._at = reader, path, file, at

    def fill(self, to: memoryview, deadline: float) -> None:
        """Fill ``to`` with the next bytes. Raises FetchError at the file's end or ``deadline``."""
        length = 0
        while length < len(to):
            most = min(_STEP, len(to) - length)
            data = self._reader.run(self._path, partial(self._file.read, self._at, most))
            if not data:
                raise FetchError(f"{self._path}: it ends at byte {self._at}")
            to[length : length + len(data)] = data
            length, self._at = length + len(data), self._at + len(data)
            if time.monotonic() > deadline and length < len(to):
                raise FetchError(f"{self._path}: {length} of {len(to)} bytes within the time limit")
