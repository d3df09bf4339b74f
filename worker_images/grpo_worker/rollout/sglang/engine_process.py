"""First process of an engine container: ``python -m grpo_worker.rollout.sglang.engine_process COMMAND...``.

SGLang's server ends itself by SIGKILL when one of its schedulers dies. The kernel does not let the first
process of a container do that: the server would stay, and answer nothing. So it is the child of this one,
which collects what it leaves behind, and reports its last error to kubelet.
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
_KEPT = 400  # lines in which the last error is looked for
_GENERAL = ("Received sigquit from a child process", "SIGQUIT received", "kill_process_tree")


def main() -> None:
    """Run the command to its end, and end with its exit code."""
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
    """Send a signal without collecting the child, which is left to ``_await``."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, received)


def report(tail: Iterator[str] | deque[str], file: Path = TERMINATION_LOG) -> None:
    """Leave the last error of a log where kubelet reads why a container has ended."""
    said = last_error_line("".join(line for line in tail if not any(text in line for text in _GENERAL)))
    if said and file.exists():
        file.write_text(said)


def _forward(source: IO[bytes], tail: deque[str]) -> None:
    """Pass a log on, line by line."""
    for line in source:
        sys.stderr.buffer.write(line)
        sys.stderr.buffer.flush()
        tail.append(line.decode(errors="replace"))


def _await(main_process: int) -> int:
    """Collect every child that ends, orphans too, until the main one does; its exit code."""
    while True:
        pid, status = os.wait()
        if pid == main_process:
            return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    main()
