"""Server on one host of a multi-host engine: it runs in the rounds that the first host's agent begins."""

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from grpo_worker.common import tls

PERIOD_SECONDS = 1.0
SILENT_SECONDS = 60.0  # without an answer; an agent takes less to restart
_TIMEOUT = 5.0
Start = Callable[[Sequence[str]], tuple["subprocess.Popen[bytes]", Callable[[], str]]]


@dataclass(slots=True)
class _Server:
    round: str
    process: "subprocess.Popen[bytes]"
    revoked: bool = False  # whether its round has ended


class HostServer:
    """Starts the command in each round, and kills it when the round ends.

    ``url``: route of the pod's agent. ``start``: starts a command in a session of its own; returns it and a
    function that returns the last error of its log after it has ended. ``wait``: reaps processes until one of
    this id ends, and returns its exit code.
    """

    def __init__(self, command: Sequence[str], url: str, start: Start, wait: Callable[[int], int]) -> None:
        self._command = list(command)
        self._url = url
        self._start, self._wait = start, wait
        self._verify = tls.for_urllib()
        self._process = uuid.uuid4().hex[:12]
        self._server: _Server | None = None
        self._failed = "", ""  # last round whose server failed, and its error
        self._answered = time.monotonic()
        self._stopping = threading.Event()

    def stop(self, received: int) -> None:
        """Pass a signal on to the server, and start no further one."""
        self._stopping.set()
        if self._server is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._server.process.pid, received)

    def run(self) -> None:
        """Run the rounds until ``stop``."""
        threading.Thread(target=self._watch_forever, daemon=True).start()
        while not self._stopping.is_set():
            answer = self._report()
            if answer is not None and answer["round"]:
                self._run_round(answer["round"], answer["rendezvous"])
            else:
                self._stopping.wait(PERIOD_SECONDS)

    def _run_round(self, number: str, rendezvous: str) -> None:
        process, last_error = self._start([*self._command, "--dist-init-addr", rendezvous])
        self._server = server = _Server(number, process)
        if self._stopping.is_set():  # a signal that came while the server started found none to pass it on to
            self.stop(signal.SIGTERM)
        code = self._wait(process.pid)
        self._server = None
        _kill(process.pid)  # its schedulers may outlive it
        if not server.revoked:
            self._failed = number, last_error() or f"exit code {code}"

    def _watch_forever(self) -> None:
        while True:
            time.sleep(PERIOD_SECONDS)
            server = self._server
            if server is not None and not self._stopping.is_set():
                self._watch(server)

    def _watch(self, server: _Server) -> None:
        """Report once, and kill the server if its round has ended."""
        answer = self._report()
        silent = time.monotonic() - self._answered > SILENT_SECONDS
        if silent or (answer is not None and answer["round"] != server.round):
            server.revoked = True
            _kill(server.process.pid)

    def _report(self) -> dict[str, str] | None:
        """Report the running server; return the agent's answer, or None while it does not answer."""
        server = self._server
        ended, error = self._failed
        fields = {
            "process": self._process, "round": server.round if server else "",
            "ended": ended, "error": error[:400],
        }  # fmt: skip
        try:
            url = f"{self._url}?{urllib.parse.urlencode(fields)}"
            verify, limit = self._verify, _TIMEOUT
            with urllib.request.urlopen(url, timeout=limit, context=verify) as response:  # noqa: S310 - the agent
                answer: dict[str, str] = json.load(response)
        except (urllib.error.URLError, OSError, ValueError):
            return None
        self._answered = time.monotonic()
        return answer


def _kill(session: int) -> None:
    """Kill every process of a session's first process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(session, signal.SIGKILL)
