"""Run program.py, then tests that it does not see: ``python -I tested_program.py DESCRIPTOR``.

The tests hold the sign that they were passed. A program that could read them, say in a file, would print the
sign instead of passing them. One that searches this process's memory still finds it.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

_PROGRAM = "program.py"


def main() -> None:
    """Take the tests off the descriptor, run the program as __main__, and the tests in the same namespace."""
    namespace = ModuleType("__main__")
    namespace.__file__ = _PROGRAM
    tests = _held(int(sys.argv[1]), namespace)
    next(tests)
    sys.argv = [_PROGRAM]
    sys.modules["__main__"] = namespace  # where pickle and dataclasses look up what the program defines
    exec(compile(Path(_PROGRAM).read_bytes(), _PROGRAM, "exec", dont_inherit=True), namespace.__dict__)
    next(tests, None)


def _held(descriptor: int, namespace: ModuleType) -> Iterator[None]:
    """Keep the text in a frame that is on no stack while the program runs."""
    with open(descriptor, encoding="utf-8") as file:
        text = file.read()
    yield
    exec(compile(text, "tests", "exec", dont_inherit=True), namespace.__dict__)


if __name__ == "__main__":
    main()
