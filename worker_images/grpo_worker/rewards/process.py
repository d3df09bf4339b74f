"""Client of one reward process, which reads and writes one line of JSON per answer."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from array import array
from dataclasses import asdict, dataclass, field
from typing import Any

import psutil

from grpo_worker.common.store_problems import store_problem
from grpo_worker.rewards.child import Program
from grpo_worker.rewards.environment import reward_environment

# Timeout of the start in timeouts of an answer: an import may read gigabytes from a cold filesystem.
START_FACTOR = 20
_KILLED = (-signal.SIGKILL, -signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one call.

    ``value``: the returned score, or 0 when the call failed because of ``problem``. ``parts``, ``warning``:
    see Returned.
    """

    value: float
    problem: str = ""
    parts: dict[str, float] = field(default_factory=dict)
    warning: str = ""


class DeadError(RuntimeError):
    """The process cannot be used any more."""


class LateError(DeadError):
    """The process did not read a request, or did not answer, in time."""


class NotStartedError(DeadError):
    """The process did not start for a reason outside the function: a later try may succeed."""


class RewardProcess:
    """A process that runs a reward function.

    Raises NotStartedError when it does not start, and DeadError when the function's own module is the reason.
    """

    def __init__(self, program: Program) -> None:
        self._timeout = program.timeout_seconds
        self._asked = 0
        self._buffer = b""
        self._process = _started(program)
        try:
            self._fields = self._loaded(program.timeout_seconds)
        except DeadError:
            self.end()
            raise

    def _loaded(self, timeout: float) -> frozenset[str]:
        """Wait until the function is loaded; return the fields of a request that it needs."""
        begun = False
        try:
            begun = bool(self._answer(timeout * START_FACTOR))
            hello = self._answer(timeout * START_FACTOR)
        except LateError as error:
            raise NotStartedError(
                f"the reward process did not start: {error} (an import may take {START_FACTOR} times "
                f"spec.reward.timeoutSeconds={timeout:g})"
            ) from error
        except DeadError as error:
            # Of the function's own module are an exit and a crash, but not the end by a node without memory.
            own = begun and self._process.poll() not in _KILLED
            raise (DeadError if own else NotStartedError)(
                f"the reward process did not start: {error}"
            ) from error
        if "error" in hello:
            outside = store_problem(OSError(hello["errno"], ""))
            raise (NotStartedError if outside else DeadError)(str(hello["error"]))
        return frozenset(hello["fields"])

    def ask(self, request: dict[str, Any]) -> Outcome:
        """Judge one answer. Raises DeadError when the process cannot be used any more."""
        self._asked += 1
        needed = {name: value for name, value in request.items() if name in self._fields}
        line = json.dumps({"id": self._asked, "request": needed}, default=_plain)
        self._send(line.encode() + b"\n")
        answer = self._answer(self._timeout)
        if answer.get("id") != self._asked:
            raise DeadError(f"the function wrote into the process's own pipe: {answer!r:.200}")
        if "error" in answer:
            return Outcome(0.0, str(answer["error"]))
        return Outcome(float(answer["score"]), parts=answer["parts"], warning=answer["warning"])

    def _send(self, data: bytes) -> None:
        """Write with a deadline, because a stopped process never empties a full pipe."""
        assert self._process.stdin is not None
        pipe, left = self._process.stdin.fileno(), memoryview(data)
        deadline = time.monotonic() + self._timeout
        while left:
            if not _ready(pipe, select.POLLOUT, deadline):
                raise LateError(f"the process read no request within {self._timeout:g} s")
            try:
                left = left[os.write(pipe, left) :]
            except OSError as error:
                raise DeadError(f"the process is gone: {error}") from error

    def _answer(self, seconds: float) -> dict[str, Any]:
        line = self._line(time.monotonic() + seconds, seconds)
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise DeadError(f"the function wrote into the process's own pipe: {line!r:.200}")
        return answer

    def _line(self, deadline: float, seconds: float) -> bytes:
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            if not _ready(pipe, select.POLLIN, deadline):
                raise LateError(f"no answer within {seconds:g} s")
            data = os.read(pipe, 65536)
            if not data:
                raise DeadError(f"the process died with exit code {self._process.wait()}")
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        return line

    def end(self) -> None:
        """Kill the process and all processes that it started."""
        session = self._process.pid
        with contextlib.suppress(ProcessLookupError):
            os.killpg(session, 9)
        for pid in psutil.pids():  # programs under test run in process groups of their own
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if os.getsid(pid) == session:
                    os.kill(pid, 9)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def _plain(value: Any) -> Any:
    """Convert a value that JSON lacks: token ids to a list, all else to text."""
    return value.tolist() if isinstance(value, array) else str(value)


def _started(program: Program) -> subprocess.Popen[bytes]:
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "grpo_worker.rewards.child", json.dumps(asdict(program))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=reward_environment() | {"PYTHONUNBUFFERED": "1"},
            start_new_session=True,  # so that ``end`` finds all processes that it starts
        )
    except OSError as error:  # no memory, or too many processes
        raise NotStartedError(f"the reward process did not start: {error}") from error
    assert process.stdin is not None
    os.set_blocking(process.stdin.fileno(), False)
    return process


def _ready(pipe: int, event: int, deadline: float) -> bool:
    """Wait until a pipe is ready; return False at the deadline.

    Uses poll because select refuses descriptors above 1023, which a job with many workers reaches.
    """
    poll = select.poll()
    poll.register(pipe, event)
    left = deadline - time.monotonic()
    return left > 0 and bool(poll.poll(left * 1000))
