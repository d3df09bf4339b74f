"""Execution of program.py and of hidden tests: ``python -I tested_program.py DESCRIPTOR``.

The tests contain the mark that is printed when they pass. A program that could read them, for example in a
file, could print the mark instead of passing. A program that searches this process's memory still finds it.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

_PROGRAM = "program.py"


def main() -> None:
    """Read the tests, run the program as __main__, then run the tests in the same namespace."""
    namespace = ModuleType("__main__")
    namespace.__file__ = _PROGRAM
    tests = _hidden_tests(int(sys.argv[1]), namespace)
    next(tests)
    sys.argv = [_PROGRAM]
    sys.modules["__main__"] = namespace  # pickle and dataclasses look up the program's classes there
    exec(compile(Path(_PROGRAM).read_bytes(), _PROGRAM, "exec", dont_inherit=True), namespace.__dict__)  # noqa: S102
    next(tests, None)


def _hidden_tests(descriptor: int, namespace: ModuleType) -> Iterator[None]:
    """Read the tests, then run them.

    A generator keeps the text in a frame that is not on the stack while the program runs.
    """
    with open(descriptor, encoding="utf-8") as file:
        text = file.read()
    yield
    exec(compile(text, "tests", "exec", dont_inherit=True), namespace.__dict__)  # noqa: S102


if __name__ == "__main__":
    main()
