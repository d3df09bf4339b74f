"""Pool of answer workers: processes in which the controller's threads decode and judge answers.

They are started by exec, not by fork, because the controller has threads. Work travels over a socket.
"""

import contextlib
import logging
import socket
import subprocess
import sys
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

from grpo_worker.rewards.environment import reward_environment

log = logging.getLogger(__name__)
_END_SECONDS = 5.0


class WorkError(RuntimeError):
    """A worker's method raised an error."""


class WorkerDiedError(RuntimeError):
    """A worker died while it worked."""


class WorkerPool:
    """Up to ``count`` processes that call methods of copies of ``worker``, an object that can be pickled.

    A process starts when there is work and none is idle. A call whose process dies is made once more, in a
    new process.
    """

    def __init__(self, worker: object, count: int) -> None:
        self._worker = worker
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="answers")
        self._idle: deque[_Process] = deque()

    def submit(self, method: str, *arguments: Any) -> Future[Any]:
        """Start a call of ``method``, in the order of the submissions.

        The result raises WorkError for an error of the method, WorkerDiedError when two processes died.
        """
        return self._threads.submit(self._call, method, arguments)

    def close(self) -> None:
        """End all processes, after the calls that were submitted."""
        self._threads.shutdown()
        while self._idle:
            self._idle.pop().end()

    def _call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        try:
            return self._once(method, arguments)
        except WorkerDiedError as error:
            log.warning("%s; the call is made once more", error)
            return self._once(method, arguments)

    def _once(self, method: str, arguments: tuple[Any, ...]) -> Any:
        process = self._process()
        try:
            result, problem = process.call(method, arguments)
        except (EOFError, OSError):
            raise WorkerDiedError(
                f"an answer worker died in {method} with exit code {process.end()}: raise the memory of the "
                "controller's pod if it was killed (exit code -9)"
            ) from None  # an OSError as the cause would count as a failure outside of the job
        self._idle.append(process)
        if problem is not None:
            raise WorkError(problem)
        return result

    def _process(self) -> "_Process":
        with contextlib.suppress(IndexError):
            return self._idle.pop()
        return _Process(self._worker)


class _Process:
    """One worker's process."""

    def __init__(self, worker: object) -> None:
        own, other = socket.socketpair()
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "grpo_worker.rewards.worker", str(other.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
                env=reward_environment(),
            )
        self._connection = Connection(own.detach())
        self._worker: object | None = worker

    def call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """Return (result, problem). Raises EOFError or OSError when the process has ended."""
        worker, self._worker = self._worker, None
        if worker is not None:
            self._connection.send(worker)
        self._connection.send((method, arguments))
        return self._connection.recv()

    def end(self) -> int:
        """Close the connection, which ends the process; return its exit code."""
        self._connection.close()
        try:
            return self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()
