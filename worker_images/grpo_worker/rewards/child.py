"""The process in which a reward function runs: ``python -m grpo_worker.rewards.child``."""

import asyncio
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
from grpo_worker.rewards.builtin import GroundTruthError
from grpo_worker.rewards.call_forms import Request, arguments, fields_of, form_of
from grpo_worker.rewards.hidden import hide_memory
from grpo_worker.rewards.returned import score_of


@dataclass(frozen=True, slots=True)
class Program:
    """What the process runs, and within which limits. ``field``: of the job, for errors."""

    field: str
    function: str
    timeout_seconds: float
    memory_megabytes: int


class Judge:
    """A function with the form it is called in. Raises ValueError when it fits no form."""

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
        self._runner = asyncio.Runner()  # one loop for all calls: clients that functions keep belong to it

    def __call__(self, request: Request) -> dict[str, Any]:
        """Score one answer, or say what went wrong, in which file and line."""
        try:
            given = arguments(self._function, self._form, request)
        except TypeError as error:
            return {"error": f"{self._line}{error}"}
        try:
            found = self._function(**given)
            if inspect.isawaitable(found):
                found = self._runner.run(_wait(found))
        except MemoryError:
            return {"error": "MemoryError: more than spec.reward.memoryMegabytes"}
        except GroundTruthError as error:  # of a built-in function: the line in it tells nothing
            return {"error": str(error)}
        except Exception as error:  # whatever a user's function raises
            return {"error": blame(error, self._source)}
        try:
            score, metrics = score_of(found, self._form.batch)
        except Exception as error:  # reading a user's object may raise anything
            return {"error": f"{self._line}{error}"}
        return {"score": score, "metrics": metrics}


async def _wait(found: Any) -> Any:
    return await found


def main() -> None:
    """Limit memory, load the function, then answer line by line until the pipe closes.

    The first line says which fields of a request the function needs, or why it cannot be called.
    """
    program = Program(**json.loads(sys.argv[1]))
    requests, answers = _pipes()
    hide_memory()
    limit = program.memory_megabytes * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        judge = Judge(_load(program))
    except ValueError as error:
        prefix = f"{program.field}={program.function}: "  # the caller names the field itself
        _write(answers, {"error": str(error).removeprefix(prefix)})
        return
    _write(answers, {"fields": judge.fields})
    for line in requests:
        asked = json.loads(line)
        _write(answers, judge(asked["request"]) | {"id": asked["id"]})


def _load(program: Program) -> Callable[..., Any]:
    function = load_function(program.field, program.function)
    if program.field != "spec.reward.builtin":
        return function
    # Answers that take too long are wrong, not failures: the built-in functions keep the time themselves.
    return functools.partial(function, timeout_seconds=program.timeout_seconds)


def _pipes() -> tuple[TextIO, TextIO]:
    """Take standard input and output for ourselves: the function reads nothing and prints to the log."""
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w", buffering=1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return requests, answers


def _write(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
