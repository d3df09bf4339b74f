"""Test cases of programs, in the layouts of common data sets."""

import json
import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from grpo_worker.rewards.builtin import GroundTruthError

_LAYOUTS = "give {inputs: [...], outputs: [...]}, with fn_name for a function, or {assert_case: [...]}"
# Calls the function (layout of APPS and LeetCode) with arguments from standard input, one line of JSON each.
_CALL = """
import json as _json, sys as _sys
_arguments = [_json.loads(line) for line in _sys.stdin if line.strip()]
_result = getattr(Solution(), {name!r}) if "Solution" in globals() else globals()[{name!r}]
print({mark!r} + _json.dumps(_result(*_arguments)))
"""


@dataclass(frozen=True, slots=True)
class Case:
    """A test. ``epilogue``: code that runs after the program. ``accepts``: whether the output is right."""

    epilogue: str
    stdin: str
    accepts: Callable[[str], bool]


def read_cases(tests: dict[str, Any]) -> list[Case]:
    """Read the layouts of verl and APPS. Raises GroundTruthError for others, and for no tests at all."""
    if "inputs" in tests and "outputs" in tests:
        inputs, outputs = tests["inputs"], tests["outputs"]
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
            raise GroundTruthError("ground_truth: inputs and outputs must be lists of one length")
        name = tests.get("fn_name")
        pairs = zip(inputs, outputs, strict=True)
        cases = [_call(name, *pair) if name else _program(*pair) for pair in pairs]
    else:
        assertions = tests.get("assert_case", tests.get("tests"))
        if assertions is None:
            raise GroundTruthError(f"ground_truth has {', '.join(tests) or 'no keys'}: {_LAYOUTS}")
        cases = [_assertion(text) for text in ([assertions] if isinstance(assertions, str) else assertions)]
    if not cases:
        raise GroundTruthError(f"ground_truth has no test: {_LAYOUTS}")
    return cases


def _program(stdin: Any, expected: Any) -> Case:
    text = _lines(expected)
    return Case("", _lines(stdin), lambda output: _same(output, text))


def _lines(value: Any) -> str:
    """Return standard input or output as text; some data sets store a list of lines."""
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _same(output: str, expected: str) -> bool:
    """Compare outputs, ignoring white space and small differences of numbers, as verl does."""
    words, others = output.split(), expected.split()
    return len(words) == len(others) and all(map(_near, words, others))


def _near(word: str, other: str) -> bool:
    if word == other:
        return True
    try:
        return math.isclose(float(word), float(other), rel_tol=1e-5, abs_tol=1e-8)
    except ValueError:
        return False


def _call(name: str, arguments: Any, expected: Any) -> Case:
    mark = secrets.token_hex(8)
    stdin = arguments if isinstance(arguments, str) else "\n".join(map(json.dumps, arguments))
    expected = _loaded(expected) if isinstance(expected, str) else expected

    def accepts(output: str) -> bool:
        # Some data sets store the result itself, others a list that contains only the result.
        result = _loaded(output.rpartition(mark)[2])
        return mark in output and any(_equal(result, value) for value in (expected, *_only(expected)))

    return Case(_CALL.format(name=name, mark=mark), stdin, accepts)


def _equal(result: Any, expected: Any) -> bool:
    """Compare JSON values, ignoring small differences of numbers with a fraction."""
    if isinstance(result, list) and isinstance(expected, list):
        return len(result) == len(expected) and all(map(_equal, result, expected))
    if isinstance(result, dict) and isinstance(expected, dict):
        return result.keys() == expected.keys() and all(_equal(result[k], expected[k]) for k in expected)
    if isinstance(result, int | float) and isinstance(expected, int | float) and result != expected:
        return isinstance(result + expected, float) and _near(str(result), str(expected))
    return bool(result == expected)


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _only(expected: Any) -> list[Any]:
    return expected if isinstance(expected, list) and len(expected) == 1 else []


def _assertion(text: str) -> Case:
    # A program that exits before the assertion does not print the mark.
    mark = secrets.token_hex(8)
    return Case(f"{text}\nprint({mark!r})\n", "", lambda output: output.rstrip().endswith(mark))
