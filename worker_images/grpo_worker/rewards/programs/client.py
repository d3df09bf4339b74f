"""Client of the process that starts programs."""

import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpo_worker
from grpo_worker.rewards.programs.scratch import scratch_folder

log = logging.getLogger(__name__)
_ROOT = str(Path(grpo_worker.__file__).parents[1])
# The interpreter's own paths are the only ones that programs may read, so the job's code is not left there.
_START = (
    "import sys; sys.path.insert(0, sys.argv[3]); from grpo_worker.rewards.programs import server; "
    "sys.path.pop(0); server.main(int(sys.argv[1]), sys.argv[2] == 'required')"
)
_START_SECONDS = 60.0
_GRACE_SECONDS = 30.0  # for starting and stopping a program, which a busy node delays


class SandboxError(ValueError):
    """Programs cannot be confined as required."""


class ProgramServer:
    """A process that runs programs one after the other. Threads may share it.

    ``required``: False lets programs run although the kernel has no Landlock.
    """

    def __init__(self, required: bool = True) -> None:
        self._required = required
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None

    def start(self) -> None:
        """Start the process if it does not run. Raises SandboxError where it cannot confine programs."""
        with self._lock:
            self._connected()

    def run(self, program: str, tests: str, stdin: str, seconds: float) -> str | None:
        """Run the program, then the tests; return their output.

        Returns None when they failed, or took, used or printed too much. The limit of this process's memory
        applies to each program. Raises SandboxError.
        """
        with self._lock, scratch_folder() as folder, contextlib.ExitStack() as files:
            (Path(folder) / "program.py").write_text(program, "utf-8", "replace")
            descriptors = [files.enter_context(_nameless(stdin)), files.enter_context(_nameless(""))]
            if tests:
                descriptors.append(files.enter_context(_nameless(tests)))
            if self._code(folder, seconds, descriptors) != 0:
                return None
            with open(descriptors[1], "rb", closefd=False) as output:
                output.seek(0)
                return output.read().decode("utf-8", "replace")

    def close(self) -> None:
        """End the process."""
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._connection = self._process = None

    def _code(self, folder: str, seconds: float, descriptors: list[int]) -> int | None:
        connection = self._connected()
        order = json.dumps({"folder": folder, "seconds": seconds}).encode()
        try:
            socket.send_fds(connection, [order], descriptors)
            code = _answer(connection, seconds + _GRACE_SECONDS)["code"]
        except (OSError, EOFError) as error:  # killed by a node without memory, for example
            log.warning("the process that starts programs ended: %r", error)
            self.close()
            return None
        return None if code is None else int(code)

    def _connected(self) -> socket.socket:
        if self._connection is None:
            own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            mode = "required" if self._required else "bestEffort"
            with other:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-X", "utf8", "-c", _START, str(other.fileno()), mode, _ROOT],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    env={"PATH": os.environ.get("PATH", "")},
                    pass_fds=[other.fileno()],
                )
            self._connection = own
            self._greet(own)
        return self._connection

    def _greet(self, connection: socket.socket) -> None:
        try:
            hello = _answer(connection, _START_SECONDS)
        except (OSError, EOFError) as error:
            self.close()
            raise SandboxError(f"the process that starts programs did not start: {error!r}") from error
        if "error" in hello:
            self.close()
            raise SandboxError(str(hello["error"]))
        if not hello["landlock"]:
            log.warning("the kernel offers no Landlock: programs can read the files of this pod")


def _answer(connection: socket.socket, seconds: float) -> dict[str, Any]:
    connection.settimeout(seconds)
    message = connection.recv(65536)
    if not message:
        raise EOFError("it closed the connection")
    answer: dict[str, Any] = json.loads(message)
    return answer


@contextlib.contextmanager
def _nameless(text: str) -> Iterator[int]:
    """Write a file without a name, which only its descriptor can open."""
    with tempfile.TemporaryFile() as file:
        file.write(text.encode("utf-8", "replace"))
        file.seek(0)
        yield file.fileno()
