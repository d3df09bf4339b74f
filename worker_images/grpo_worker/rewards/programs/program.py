"""Execution of program.py and of hidden tests in this interpreter.

The tests contain the mark that is printed when they pass. A program that could read them, for example in a
file, could print the mark instead of passing. A program that searches this process's memory still finds it.
"""

import os
import sys
from collections.abc import Iterator
from types import ModuleType

_PROGRAM = "program.py"
_DESCRIPTORS = 2**20  # more than a process has
_ENVIRONMENT = ("PATH",)
_STREAMS = (
    (0, "stdin", "r", "surrogateescape"),
    (1, "stdout", "w", "surrogateescape"),
    (2, "stderr", "w", "backslashreplace"),
)


def take_over(folder: str, descriptors: list[int]) -> None:
    """Make this process the program's: its folder, environment and standard streams.

    ``descriptors``: standard input, output, and the tests' file, which becomes descriptor 3.
    """
    os.chdir(folder)
    kept = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    os.environ.clear()
    os.environ.update(kept | {"HOME": folder, "TMPDIR": folder})
    nothing = os.open(os.devnull, os.O_WRONLY)
    copies = [os.dup(descriptor) for descriptor in (*descriptors[:2], nothing, *descriptors[2:])]
    # 0 to 2 are open, so no copy is one of them; 3 may be one, and is replaced last.
    for target, copy in enumerate(copies):
        os.dup2(copy, target)
    for number, name, mode, errors in _STREAMS:
        stream = os.fdopen(number, mode, encoding="utf-8", errors=errors, closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def run(has_tests: bool) -> None:
    """Read the tests, run the program as __main__, then run the tests in the same namespace.

    Closes all descriptors but the program's first.
    """
    os.closerange(4 if has_tests else 3, _DESCRIPTORS)
    namespace = ModuleType("__main__")
    namespace.__file__ = _PROGRAM
    tests = _hidden_tests(namespace) if has_tests else iter(())
    next(tests, None)
    sys.argv = [_PROGRAM]
    sys.modules["__main__"] = namespace  # pickle and dataclasses look up the program's classes there
    with open(_PROGRAM, "rb") as file:
        text = file.read()
    exec(compile(text, _PROGRAM, "exec", dont_inherit=True), namespace.__dict__)  # noqa: S102
    next(tests, None)


def _hidden_tests(namespace: ModuleType) -> Iterator[None]:
    """Read the tests, then run them.

    A generator keeps the text in a frame that is not on the stack while the program runs.
    """
    with open(3, encoding="utf-8") as file:
        text = file.read()
    yield
    exec(compile(text, "tests", "exec", dont_inherit=True), namespace.__dict__)  # noqa: S102
