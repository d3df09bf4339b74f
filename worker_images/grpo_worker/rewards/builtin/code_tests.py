"""Verifier of programs by the share of tests that they pass."""

import json
import time
from typing import Any

from grpo_worker.rewards.builtin import GroundTruthError
from grpo_worker.rewards.builtin.cases import Case, read_cases
from grpo_worker.rewards.builtin.fenced import last_block
from grpo_worker.rewards.builtin.run_python import run_python

_SHARE = 0.8  # of an answer's time for its tests; the rest is for starting and stopping processes


def compute_score(solution_str: str, ground_truth: Any, timeout_seconds: float) -> float:
    """Return the share of passed tests, as verl does; tests that do not start in time count as failed.

    The program is the answer's last block of Python, else its last block, else the whole answer.
    """
    cases = read_cases(_loaded(ground_truth))
    program = last_block(solution_str, ("python", "python3", "py"))
    if program is None:
        program = solution_str
    deadline = time.monotonic() + timeout_seconds * _SHARE
    return sum(_passes(case, program, deadline) for case in cases) / len(cases)


def _passes(case: Case, program: str, deadline: float) -> bool:
    left = deadline - time.monotonic()
    if left <= 0:
        return False
    output = run_python(program, case.epilogue, case.stdin, left)
    return output is not None and case.accepts(output)


def _loaded(ground_truth: Any) -> dict[str, Any]:
    try:
        tests = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    except ValueError as error:
        raise GroundTruthError(f"ground_truth={ground_truth!r:.200} is not JSON: {error}") from error
    if not isinstance(tests, dict):
        raise GroundTruthError(
            f"ground_truth={ground_truth!r:.200} must be JSON with inputs and outputs, or with assert_case"
        )
    return tests
