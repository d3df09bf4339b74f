"""A reward for speed measurements: cheap, and not the same for all answers."""

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]
) -> float:
    """Share of the answer's characters that are those of the truth."""
    del data_source, extra_info
    return sum(character in ground_truth for character in solution_str) / max(len(solution_str), 1)
