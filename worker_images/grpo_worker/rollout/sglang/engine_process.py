"""First process of an engine container: ``python -m ...engine_process [--rounds URL] COMMAND...``.

SGLang's server kills itself with SIGKILL when one of its schedulers dies. The kernel ignores that signal if
the first process of a container sends it to itself: the server would keep running without responding. It is
therefore a child of this process, which also reaps orphaned processes and reports the last error to kubelet.
With ``--rounds`` it is one host's server of a multi-host engine; see host_server.py. It also writes the
server's lines to the file that $GRPO_ENGINE_LOG names, for the agent.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from grpo_operator.api.errors import last_error_line
from grpo_operator.api.names import ENGINE_LOG_VARIABLE
from grpo_worker.common.shared_lines import LinesWriter
from grpo_worker.rollout.sglang.engine_tls import own_arguments
from grpo_worker.rollout.sglang.host_server import HostServer

TERMINATION_LOG = Path("/dev/termination-log")  # kubelet's own default
_KEPT = 400  # lines that are searched for the last error
_DRAIN_SECONDS = 1.0  # for the end of a log; a grandchild may hold the pipe open
_GENERAL = ("Received sigquit from a child process", "SIGQUIT received", "kill_process_tree")


def main() -> None:
    """Run the command and exit with its exit code."""
    if sys.argv[1] == "--rounds":
        _run_rounds(sys.argv[2], sys.argv[3:])
        return
    process = subprocess.Popen([*sys.argv[1:], *own_arguments()], stderr=subprocess.PIPE)
    _on_signals(lambda received: _pass_on(process.pid, received))
    log = ErrorLog(process)
    code = _await(process.pid)
    message = log.last_error()
    if code:
        report(message)
    sys.exit(code if code >= 0 else 128 - code)


def _run_rounds(url: str, command: list[str]) -> None:
    """Run a host's server in the rounds of its engine, until a signal ends this process."""
    server = HostServer([*command, *own_arguments()], url, _start_session, _await)
    _on_signals(server.stop)
    server.run()


def _start_session(command: Sequence[str]) -> "tuple[subprocess.Popen[bytes], Callable[[], str]]":
    process = subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True)
    return process, ErrorLog(process).last_error


def _on_signals(act: Callable[[int], None]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _frame: act(received))


class ErrorLog:
    """Copies a process's standard error to this process's, and keeps its last lines.

    All lines go to the file of ENGINE_LOG_VARIABLE, too, if it names one.
    """

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stderr is not None
        self._source = process.stderr
        self._tail: deque[str] = deque(maxlen=_KEPT)
        file = os.environ.get(ENGINE_LOG_VARIABLE)
        self._shared = LinesWriter(Path(file)) if file else None
        self._reader = threading.Thread(target=self._copy, daemon=True)
        self._reader.start()

    def last_error(self) -> str:
        """Return the last error of a process that has ended, or an empty text."""
        self._reader.join(timeout=_DRAIN_SECONDS)
        return last_error(list(self._tail))

    def _copy(self) -> None:
        for line in self._source:
            sys.stderr.buffer.write(line)
            sys.stderr.buffer.flush()
            self._tail.append(line.decode(errors="replace"))
            if self._shared:
                self._shared.write(line)


def _pass_on(pid: int, received: int) -> None:
    """Send a signal to the child without reaping it, which is left to ``_await``."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, received)


def report(message: str, file: Path = TERMINATION_LOG) -> None:
    """Write a message to the file from which kubelet reads why a container ended."""
    if message and file.exists():
        file.write_text(message)


def last_error(lines: Iterable[str]) -> str:
    """Return the last error of a server's log, without SGLang's echoes of it."""
    return last_error_line("".join(line for line in lines if not any(text in line for text in _GENERAL)))


def _await(main_process: int) -> int:
    """Reap every child, including orphans, until the main process ends; return its exit code."""
    while True:
        pid, status = os.wait()
        if pid == main_process:
            return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    main()
