"""First process of an engine container: ``python -m grpo_worker.rollout.sglang.engine_process COMMAND...``.

SGLang's server kills itself with SIGKILL when one of its schedulers dies. The kernel ignores that signal if
the first process of a container sends it to itself: the server would keep running without responding. It is
therefore a child of this process, which also reaps orphaned processes and reports the last error to kubelet.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from grpo_operator.api.errors import last_error_line

TERMINATION_LOG = Path("/dev/termination-log")  # kubelet's own default
_KEPT = 400  # lines that are searched for the last error
_GENERAL = ("Received sigquit from a child process", "SIGQUIT received", "kill_process_tree")


def main() -> None:
    """Run the command and exit with its exit code."""
    process = subprocess.Popen(sys.argv[1:], stderr=subprocess.PIPE)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _frame: _pass_on(process.pid, received))
    tail: deque[str] = deque(maxlen=_KEPT)
    assert process.stderr is not None
    reader = threading.Thread(target=_forward, args=(process.stderr, tail), daemon=True)
    reader.start()
    code = _await(process.pid)
    reader.join(timeout=1)  # a grandchild may hold the pipe open
    if code:
        report(tail)
    sys.exit(code if code >= 0 else 128 - code)


def _pass_on(pid: int, received: int) -> None:
    """Send a signal to the child without reaping it, which is left to ``_await``."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, received)


def report(tail: Iterator[str] | deque[str], file: Path = TERMINATION_LOG) -> None:
    """Write the last error of a log to the file from which kubelet reads why a container ended."""
    message = last_error_line("".join(line for line in tail if not any(text in line for text in _GENERAL)))
    if message and file.exists():
        file.write_text(message)


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
