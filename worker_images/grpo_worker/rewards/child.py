"""Entry point of the process that runs a reward function: ``python -m grpo_worker.rewards.child``."""

import asyncio
import ctypes
import functools
import inspect
import json
import os
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from grpo_worker.common.user_function import blame, load_function
from grpo_worker.rewards.builtin import BUILTIN, GroundTruthError
from grpo_worker.rewards.builtin.run_python import start_sandbox, use_sandbox
from grpo_worker.rewards.call_forms import Request, arguments, fields_of, form_of
from grpo_worker.rewards.programs.client import SandboxError
from grpo_worker.rewards.returned import score_of

_PR_SET_DUMPABLE = 4
_LESS = ", or set bestEffort to run programs within what the kernel offers"


@dataclass(frozen=True, slots=True)
class Program:
    """Function that the process runs, and its limits. ``field``: of the job, for error messages.

    ``sandbox``: of the programs that the function runs, see ``spec.reward.sandbox``.
    """

    field: str
    function: str
    timeout_seconds: float
    memory_megabytes: int
    sandbox: str = "required"


class Judge:
    """A reward function and its call form. Raises ValueError when the function fits no form."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        code = getattr(inspect.unwrap(function), "__code__", None)
        self._source = code.co_filename if code else ""
        self._line = f"{Path(self._source).name}:{code.co_firstlineno}: " if code else ""
        try:
            self._form = form_of(function)
        except TypeError as error:
            raise ValueError(f"{self._line}{error}") from error
        self.fields = fields_of(function, self._form)
        self._runner = asyncio.Runner()  # one loop for all calls: a function may keep clients bound to it

    def __call__(self, request: Request) -> dict[str, Any]:
        """Return the score and parts of an answer, or an error with file and line."""
        try:
            keywords = arguments(self._function, self._form, request)
        except TypeError as error:
            return {"error": f"{self._line}{error}"}
        try:
            result = self._function(**keywords)
            if inspect.isawaitable(result):
                result = self._runner.run(_wait(result))
        except MemoryError:
            return {"error": "MemoryError: more than spec.reward.memoryMegabytes"}
        except GroundTruthError as error:  # raised by a built-in function, whose lines do not help users
            return {"error": str(error)}
        except Exception as error:  # noqa: BLE001 - a user's function may raise anything
            return {"error": blame(error, self._source)}
        try:
            found = score_of(result, self._form.batch)
        except Exception as error:  # noqa: BLE001 - reading a user's object may raise anything
            return {"error": f"{self._line}{error}"}
        warning = found.warning and f"{self._line}{found.warning}"
        return {"score": found.score, "parts": found.parts, "warning": warning}


async def _wait(awaitable: Any) -> Any:
    return await awaitable


def main() -> None:
    """Limit memory, load the function, then answer requests, one a line, until the pipe closes.

    The first line of output says that the loading begins: what goes wrong before is not the function's fault.
    The second one names the fields of a request that the function needs, or the error that makes it unusable
    and the system's number of that error.
    """
    program = Program(**json.loads(sys.argv[1]))
    requests, answers = _pipes()
    hide_memory()
    limit = program.memory_megabytes * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _write(answers, {"loading": program.function})
    try:
        judge = Judge(_load(program))
    except (ValueError, OSError) as error:  # OSError: the file's folder cannot be read
        prefix = f"{program.field}={program.function}: "  # the caller names the field itself
        _write(answers, {"error": str(error).removeprefix(prefix), "errno": _errno_of(error)})
        return
    _write(answers, {"fields": judge.fields})
    for line in requests:
        message = json.loads(line)
        _write(answers, judge(message["request"]) | {"id": message["id"]})


def hide_memory() -> None:
    """Hide environ, mem and fd in /proc/PID of this process from other processes of its user.

    Programs that it starts must not read the job's data there. Processes with CAP_SYS_PTRACE still can.
    Raises OSError when the kernel refuses.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_DUMPABLE): {os.strerror(number)}")


def _load(program: Program) -> Callable[..., Any]:
    use_sandbox(program.sandbox)
    function = load_function(program.field, program.function)
    if program.function == BUILTIN["code"]:
        _start_sandbox(program)
    if program.field != "spec.reward.builtin":
        return function
    # An answer that takes too long to judge is wrong, not a failure, so built-in functions enforce the limit.
    return functools.partial(function, timeout_seconds=program.timeout_seconds)


def _start_sandbox(program: Program) -> None:
    try:
        start_sandbox()
    except SandboxError as error:
        raise ValueError(
            f"spec.reward.sandbox={program.sandbox}: {error}: use other nodes for the controller's pod"
            + _LESS * (program.sandbox == "required")
        ) from error


def _errno_of(error: BaseException | None) -> int:
    """Return the system's number of an error or of what it was raised for; 0 if there is none."""
    while error is not None:
        if isinstance(error, OSError) and error.errno:
            return error.errno
        error = error.__cause__ or error.__context__
    return 0


def _pipes() -> tuple[TextIO, TextIO]:
    """Reserve standard input and output for messages: the function's own prints go to the log."""
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w", buffering=1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return requests, answers


def _write(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
