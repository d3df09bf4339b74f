"""Tests of a program, in the layouts that data sets have them."""

import json
import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from grpo_worker.rewards.builtin import GroundTruthError

_LAYOUTS = "give {inputs: [...], outputs: [...]}, with fn_name for a function, or {assert_case: [...]}"
# Calls the function (APPS' and LeetCode's layout) with arguments from standard input, a line of JSON each.
_CALL = """
import json as _json, sys as _sys
_arguments = [_json.loads(line) for line in _sys.stdin if line.strip()]
_result = getattr(Solution(), {name!r}) if "Solution" in globals() else globals()[{name!r}]
print({mark!r} + _json.dumps(_result(*_arguments)))
"""


@dataclass(frozen=True, slots=True)
class Case:
    """One test. ``epilogue``: code that runs after the program. ``accepts``: is the output right?"""

    epilogue: str
    stdin: str
    accepts: Callable[[str], bool]


def read_cases(tests: dict[str, Any]) -> list[Case]:
    """Read verl's and APPS' layouts. Raises GroundTruthError for others, and when there is no test."""
    if "inputs" in tests and "outputs" in tests:
        inputs, outputs = tests["inputs"], tests["outputs"]
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
            raise GroundTruthError("ground_truth: inputs and outputs must be lists of one length")
        name = tests.get("fn_name")
        pairs = zip(inputs, outputs, strict=True)
        cases = [_call(name, *pair) if name else _program(*pair) for pair in pairs]
    else:
        found = tests.get("assert_case", tests.get("tests"))
        if found is None:
            raise GroundTruthError(f"ground_truth has {', '.join(tests) or 'no keys'}: {_LAYOUTS}")
        cases = [_assertion(text) for text in ([found] if isinstance(found, str) else found)]
    if not cases:
        raise GroundTruthError(f"ground_truth has no test: {_LAYOUTS}")
    return cases


def _program(given: Any, wanted: Any) -> Case:
    text = _lines(wanted)
    return Case("", _lines(given), lambda output: _same(output, text))


def _lines(value: Any) -> str:
    """Standard input or output: text, or its lines."""
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _same(output: str, wanted: str) -> bool:
    """White space does not matter, and numbers need only be near, as in verl."""
    words, others = output.split(), wanted.split()
    return len(words) == len(others) and all(map(_near, words, others))


def _near(word: str, other: str) -> bool:
    if word == other:
        return True
    try:
        return math.isclose(float(word), float(other), rel_tol=1e-5, abs_tol=1e-8)
    except ValueError:
        return False


def _call(name: str, given: Any, wanted: Any) -> Case:
    mark = secrets.token_hex(8)
    stdin = given if isinstance(given, str) else "\n".join(map(json.dumps, given))
    expected = _loaded(wanted) if isinstance(wanted, str) else wanted

    def accepts(output: str) -> bool:
        # Data sets have the result as it is or as the only one of a list.
        found = _loaded(output.rpartition(mark)[2])
        return mark in output and any(_equal(found, value) for value in (expected, *_only(expected)))

    return Case(_CALL.format(name=name, mark=mark), stdin, accepts)


def _equal(found: Any, wanted: Any) -> bool:
    """Compare JSON. Numbers with a fraction need only be near, as in what programs print."""
    if isinstance(found, list) and isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(_equal, found, wanted))
    if isinstance(found, dict) and isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(_equal(found[key], wanted[key]) for key in wanted)
    if isinstance(found, int | float) and isinstance(wanted, int | float) and found != wanted:
        return isinstance(found + wanted, float) and _near(str(found), str(wanted))
    return bool(found == wanted)


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _only(expected: Any) -> list[Any]:
    return expected if isinstance(expected, list) and len(expected) == 1 else []


def _assertion(text: str) -> Case:
    # A program that ends before the assertion does not print the mark.
    mark = secrets.token_hex(8)
    return Case(f"{text}\nprint({mark!r})\n", "", lambda output: output.rstrip().endswith(mark))
