"""A reward for speed measurements: cheap, and different for different answers."""

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]
) -> float:
    """Return the share of the answer's characters that occur in the truth."""
    del data_source, extra_info
    return sum(character in ground_truth for character in solution_str) / max(len(solution_str), 1)
