"""Verifier of mathematical answers by their last formula."""

import re
from typing import Any

from math_verify import parse, verify

from grpo_worker.rewards.builtin import GroundTruthError

_BOX = "\\boxed"
_HASHES = re.compile(r"^[ \t]*####(?!#)[ \t]*([^\n]*)", re.MULTILINE)
_COMMAND = re.compile(r"\\[A-Za-z]+")
_WORD = re.compile(r"[A-Za-z]{2}")
_QUANTITY = re.compile(r"[-+$€£]?\d(?:[\d.,/]*\d)?%?[ \t]+[A-Za-z]+\.?")
_STEPS = 8  # two parses, at most four comparisons and a reserve share an answer's time


def compute_score(solution_str: str, ground_truth: Any, timeout_seconds: float) -> float:
    r"""Return 1 for a formula that equals the ground truth, 0 for another formula or none.

    The answer's last ``\boxed{}`` or last line ``#### 72`` (as in GSM8K) counts, whichever comes later, else
    its last formula or number. A formula that takes too long to compare counts as wrong.
    """
    seconds = max(1, int(timeout_seconds / _STEPS))
    gold = parse(_gold(str(ground_truth)), parsing_timeout=seconds)
    if not gold:
        raise GroundTruthError(f"ground_truth={ground_truth!r:.200} holds no formula that math-verify reads")
    answer = parse(_final(solution_str), parsing_timeout=seconds)
    return float(bool(answer) and verify(gold, answer, timeout_seconds=seconds))


def _gold(text: str) -> str:
    final = _final(text).strip()
    return final if _BOX in final or "$" in final else f"{_BOX}{{{final}}}"


def _final(text: str) -> str:
    """Return the final answer only, because math-verify would combine all boxes into a set."""
    box = text.rfind(_BOX)
    answers = [line for line in _HASHES.finditer(text) if _is_answer(line[1].strip())]
    if answers and answers[-1].start() > box:
        return answers[-1][1].strip()
    return text[box:] if box >= 0 else text


def _is_answer(line: str) -> bool:
    """Return whether the text after ``####`` is an answer such as ``72 dollars``, not a Markdown heading."""
    words = _COMMAND.sub("", line)
    has_value = any(char.isalnum() for char in line)
    return has_value and (not _WORD.search(words) or _QUANTITY.fullmatch(line) is not None)
