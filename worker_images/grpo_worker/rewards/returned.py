"""What a reward function returned, as a score."""

import math
from typing import Any

_WANTED = "return a number, or a dict with the number as 'score'"
_WANTED_LIST = "return a list with one number for each of completions"


def score_of(found: Any, batch: bool) -> tuple[float, dict[str, float]]:
    """Read the score and further numbers. ``batch``: the function was given lists of one.

    Raises TypeError or ValueError for what is no score.
    """
    if batch:
        return _number(_only(found)), {}
    if not isinstance(found, dict):
        return _number(found), {}
    if "score" not in found:
        raise ValueError(f"returned a dict with {', '.join(map(str, found)) or 'nothing'}: {_WANTED}")
    numbers = {str(key): _float(value) for key, value in found.items() if key != "score"}
    return _number(found["score"]), {
        key: number for key, number in numbers.items() if number is not None and math.isfinite(number)
    }


def _only(found: Any) -> Any:
    values = found.tolist() if hasattr(found, "tolist") else found
    if not isinstance(values, list | tuple) or len(values) != 1:
        raise TypeError(f"returned {_shown(found)} for one completion: {_WANTED_LIST}")
    if values[0] is None:
        # TRL lets another function judge such a row; here is no other.
        raise ValueError(
            "returned [None], but no other function judges the row: return a number, such as [0.0]"
        )
    return values[0]


def _number(found: Any) -> float:
    number = _float(found)
    if number is None:
        raise TypeError(f"returned {_shown(found)}: {_WANTED}")
    if not math.isfinite(number):
        raise ValueError(f"returned {number}: {_WANTED} that is finite")
    return number


def _float(found: Any) -> float | None:
    """NumPy's and PyTorch's scalars are numbers too; a text is none, even one of digits."""
    try:
        return float(found) if hasattr(found, "__float__") else None
    except Exception:  # an array of several, a tensor without a value
        return None


def _shown(found: Any) -> str:
    return f"{found!r:.100} ({type(found).__name__})"
