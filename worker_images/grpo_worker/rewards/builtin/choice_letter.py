"""Verifier of multiple-choice answers by the chosen letter."""

import re
from typing import Any

from grpo_worker.rewards.builtin import GroundTruthError

_LETTER = re.compile(r"\W*([A-Za-z])\W*")
_STYLE = r"(?:\\(?:text|textbf|mathrm|mathbf)\{)?\s*"
_LONE = rf"[\s*$]*{_STYLE}(?:\\?\(\s*{_STYLE}([A-Za-z])\}}?\s*\\?\)|([A-Z])(?![\w']))"
# Most reliable first; of several matches in the text the last one counts.
_CHOICES = (
    re.compile(rf"\\boxed\{{\s*{_STYLE}\(?([A-Za-z])\)?[\s.}}]"),
    re.compile(rf"(?:\A|\n){_LONE}[\s.*$}}]*\Z"),
    re.compile(rf"(?i:answer)[\s*]*(?i:is\b|:)[\s:*]*(?i:(?:option|choice)\s)?{_LONE}"),
    re.compile(r"\(([A-Za-z])\)[\s.*$]*\Z"),
    re.compile(r"(?:\A|\n)[\s*]*([A-Z])[).:][^\n]*\Z"),
)


def compute_score(solution_str: str, ground_truth: Any, timeout_seconds: float) -> float:
    r"""Return 1 for ``\boxed{B}``, ``Answer: B``, or ``(B)`` or a line ``B`` at the end if B is right."""
    right = _LETTER.fullmatch(str(ground_truth))
    if right is None:
        raise GroundTruthError(
            f"ground_truth={ground_truth!r:.200} is not a letter: give the letter of the right choice"
        )
    return float(_chosen(solution_str.strip()) == right[1].upper())


def _chosen(text: str) -> str | None:
    for pattern in _CHOICES:
        matches = list(pattern.finditer(text))
        if matches:
            return next(letter for letter in matches[-1].groups() if letter).upper()
    return None
