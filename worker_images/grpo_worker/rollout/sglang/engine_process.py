"""First process of an engine container: ``python -m ...engine_process [--rounds URL] COMMAND...``.

SGLang's server kills itself with SIGKILL when one of its schedulers dies. The kernel ignores that signal if
the first process of a container sends it to itself: the server would keep running without responding. It is
therefore a child of this process, which also reaps orphaned processes and reports the last error to kubelet.
With ``--rounds`` it is one host's server of a multi-host engine; see host_server.py.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

from grpo_operator.api.errors import last_error_line
from grpo_worker.rollout.sglang.host_server import HostServer

TERMINATION_LOG = Path("/dev/termination-log")  # kubelet's own default
_KEPT = 400  # lines that are searched for the last error
_GENERAL = ("Received sigquit from a child process", "SIGQUIT received", "kill_process_tree")


def main() -> None:
    """Run the command and exit with its exit code."""
    if sys.argv[1] == "--rounds":
        _run_rounds(sys.argv[2], sys.argv[3:])
        return
    process = subprocess.Popen(sys.argv[1:], stderr=subprocess.PIPE)
    _on_signals(lambda received: _pass_on(process.pid, received))
    tail: deque[str] = deque(maxlen=_KEPT)
    reader = _forward_errors(process, tail)
    code = _await(process.pid)
    reader.join(timeout=1)  # a grandchild may hold the pipe open
    if code:
        report(tail)
    sys.exit(code if code >= 0 else 128 - code)


def _run_rounds(url: str, command: list[str]) -> None:
    """Run a host's server in the rounds of its engine, until a signal ends this process."""
    server = HostServer(command, url, _start_session, _await, _last_error)
    _on_signals(server.stop)
    server.run()


def _start_session(command: Sequence[str], tail: deque[str]) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True)
    _forward_errors(process, tail)
    return process


def _on_signals(act: Callable[[int], None]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _frame: act(received))


def _forward_errors(process: "subprocess.Popen[bytes]", tail: deque[str]) -> threading.Thread:
    assert process.stderr is not None
    reader = threading.Thread(target=_forward, args=(process.stderr, tail), daemon=True)
    reader.start()
    return reader


def _pass_on(pid: int, received: int) -> None:
    """Send a signal to the child without reaping it, which is left to ``_await``."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, received)


def report(tail: Iterator[str] | deque[str], file: Path = TERMINATION_LOG) -> None:
    """Write the last error of a log to the file from which kubelet reads why a container ended."""
    message = _last_error(tail)
    if message and file.exists():
        file.write_text(message)


def _last_error(tail: Iterator[str] | deque[str]) -> str:
    return last_error_line("".join(line for line in tail if not any(text in line for text in _GENERAL)))


def _forward(source: IO[bytes], tail: deque[str]) -> None:
    """Copy a log to standard error, line by line, and keep its end in ``tail``."""
    for line in source:
        sys.stderr.buffer.write(line)
        sys.stderr.buffer.flush()
        tail.append(line.decode(errors="replace"))


def _await(main_process: int) -> int:
    """Reap every child, including orphans, until the main process ends; return its exit code."""
    while True:
        pid, status = os.wait()
        if pid == main_process:
            return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    main()
