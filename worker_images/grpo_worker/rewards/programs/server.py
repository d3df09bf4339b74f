"""Process that starts programs: an interpreter that forks for each, so that none has to be loaded.

It serves one reward process over a socket and ends with it. It holds nothing that a program must not see:
programs inherit its memory.
"""

import gc
import json
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from grpo_worker.rewards.programs import program
from grpo_worker.rewards.programs.confine import Boundary, UnsupportedError, find_boundary
from grpo_worker.rewards.programs.kernel import end_with_parent
from grpo_worker.rewards.programs.namespaces import enter_namespaces
from grpo_worker.rewards.programs.usage import too_much
from grpo_worker.rewards.programs.verify import verify

_TICK_SECONDS = 0.01
_MESSAGE_BYTES = 65536
_DESCRIPTORS = 3
_ENDS = {signal.SIGCHLD}


@dataclass(frozen=True, slots=True)
class Order:
    """A program to run: its folder, limit of time and open files (input, output, and tests if any)."""

    folder: str
    seconds: float
    descriptors: list[int]


def main(descriptor: int, required: bool) -> None:
    """Serve until the connection closes; in the process of a program, run it and return."""
    connection = socket.socket(fileno=descriptor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)
    try:
        boundary = find_boundary(required)
        namespaces = enter_namespaces()
        verify(boundary)
    except UnsupportedError as error:
        _tell(connection, {"error": str(error)})
        return
    _tell(connection, {"landlock": boundary.landlock, "namespaces": namespaces})
    gc.collect()
    gc.freeze()  # so that collections in programs do not copy this process's memory
    run = _serve(connection, boundary)
    if run is not None:
        connection.detach()  # the program's process has closed it, and may use its number
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDS)
        run()


def _serve(connection: socket.socket, boundary: Boundary) -> Callable[[], None] | None:
    """Answer orders. Returns None at the end, and in a program's process what to run there."""
    own = os.getpid()
    while (order := _next(connection)) is not None:
        process = os.fork()
        if process == 0:
            return _confined(order, boundary, own)
        for descriptor in order.descriptors:
            os.close(descriptor)
        _tell(connection, {"code": _watch(process, order)})
    return None


def _confined(order: Order, boundary: Boundary, parent: int) -> Callable[[], None]:
    log = os.dup(2)
    try:
        end_with_parent(parent)
        os.setpgid(0, 0)
        program.take_over(order.folder, order.descriptors)
        boundary.enter(order.folder, order.seconds)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the program must not run
        os.write(log, f"a program was not run, because it could not be confined: {error!r}\n".encode())
        os._exit(1)
    has_tests = len(order.descriptors) == _DESCRIPTORS
    return lambda: program.run(has_tests)


def _watch(process: int, order: Order) -> int | None:
    """Wait for a program; return its exit code, or None if it took or used too much and was killed."""
    deadline = time.monotonic() + order.seconds
    while os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        left = deadline - time.monotonic()
        if left <= 0 or (not _wait(min(_TICK_SECONDS, left)) and too_much(process, order.folder)):
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            return None
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def _wait(seconds: float) -> bool:
    """Return as soon as a program has ended, else False after ``seconds``."""
    return signal.sigtimedwait(_ENDS, seconds) is not None


def _next(connection: socket.socket) -> Order | None:
    message, descriptors, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, _DESCRIPTORS)
    if not message:
        return None
    return Order(**json.loads(message), descriptors=descriptors)


def _tell(connection: socket.socket, answer: dict[str, object]) -> None:
    connection.send(json.dumps(answer).encode())
