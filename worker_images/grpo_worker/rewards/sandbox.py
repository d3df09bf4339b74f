"""A user's function in processes that may raise, hang, die or eat memory without harm to the job."""

import contextlib
import json
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

log = logging.getLogger(__name__)
START_SECONDS = 60.0  # a function's module may import much
# A reward function needs no secret of the pod.
_ENVIRONMENT = ("PATH", "PYTHONPATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "TMPDIR")


@dataclass(frozen=True, slots=True)
class Outcome:
    """``value``: what the function returned, 0 when ``problem`` says why it did not."""

    value: float
    problem: str = ""


class Sandbox:
    """``workers`` processes, each judging one answer at a time."""

    def __init__(self, function: str, workers: int, timeout: float, memory_megabytes: int) -> None:
        self._timeout = timeout
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="reward")
        self._local = threading.local()
        self._command = [sys.executable, "-m", "grpo_worker.rewards.child", function, str(memory_megabytes)]

    def call(self, arguments: Sequence[dict[str, Any]]) -> list[Outcome]:
        """Outcomes in order. Raises ValueError when the function cannot be loaded at all."""
        return list(self._threads.map(self._one, arguments))

    def _one(self, arguments: dict[str, Any]) -> Outcome:
        child: _Child | None = getattr(self._local, "child", None)
        if child is None:
            child = self._local.child = _Child(self._command)
        try:
            return child.ask(arguments, self._timeout)
        except _DeadError as error:
            child.end()
            self._local.child = None
            log.warning("reward function: %s", error)
            return Outcome(0.0, str(error))


class _DeadError(RuntimeError):
    """The process is of no more use."""


class _Child:
    """One process: a line of JSON in, a line of JSON out."""

    def __init__(self, command: list[str]) -> None:
        environment = {key: os.environ[key] for key in _ENVIRONMENT if key in os.environ}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment | {"PYTHONUNBUFFERED": "1"},
            start_new_session=True,  # so that what it starts ends with it
        )
        self._buffer = b""
        try:
            hello = json.loads(self._line(time.monotonic() + START_SECONDS))
        except _DeadError as error:
            self.end()
            raise ValueError(f"the reward process did not start: {error}") from error
        if "error" in hello:
            self.end()
            raise ValueError(hello["error"])

    def ask(self, arguments: dict[str, Any], timeout: float) -> Outcome:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(arguments, default=str).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise _DeadError(f"the process is gone: {error}") from error
        answer = json.loads(self._line(time.monotonic() + timeout))
        return Outcome(0.0, answer["error"]) if "error" in answer else Outcome(float(answer["score"]))

    def _line(self, deadline: float) -> bytes:
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([pipe], [], [], left)[0]:
                raise _DeadError("no answer in time")
            data = os.read(pipe, 65536)
            if not data:
                raise _DeadError(f"the process died with exit code {self._process.wait()}")
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        return line

    def end(self) -> None:
        """Kill the process and whatever it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, 9)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
