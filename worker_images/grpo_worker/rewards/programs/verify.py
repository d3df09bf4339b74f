"""Proof that the boundary holds, before the first program."""

import os
import socket
from collections.abc import Callable

from grpo_worker.rewards.programs.confine import Boundary, UnsupportedError

_FAILURES = {
    1: "the kernel refused a part of the boundary; the log has the error",
    2: "the filter of system calls has no effect",
    3: "Landlock has no effect",
}


def verify(boundary: Boundary) -> None:
    """Enter the boundary in a process of its own and try to leave it. Raises UnsupportedError."""
    process = os.fork()
    if process == 0:
        os._exit(_attempts(boundary))
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    if code:
        problem = _FAILURES.get(code, f"exit code {code}")
        raise UnsupportedError(f"programs cannot be confined on this node: {problem}")


def _attempts(boundary: Boundary) -> int:
    try:
        boundary.enter(os.devnull, 1)
    except OSError as error:
        os.write(2, f"{error}\n".encode())
        return 1
    if _succeeds(lambda: socket.socket(socket.AF_UNIX).close()):
        return 2
    return 3 if boundary.landlock and _succeeds(lambda: os.listdir("/")) else 0


def _succeeds(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except OSError:
        return False
    return True
