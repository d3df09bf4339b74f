"""Conversion of a reward function's result to a score."""

import math
import re
from dataclasses import dataclass, field
from typing import Any

_REMEDY = "return a number, or a dict with the number as 'score'"
_REMEDY_LIST = "return a list with one number for each of completions"
MOST_PARTS = 16
# Also names of metrics, which MLflow refuses with other characters.
_PART_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_. -]{0,63}")


@dataclass(frozen=True, slots=True)
class Returned:
    """A score and its named parts, at most MOST_PARTS. ``warning``: about what is left out, or ""."""

    score: float
    parts: dict[str, float] = field(default_factory=dict)
    warning: str = ""


def score_of(result: Any, batch: bool) -> Returned:
    """Return the score and its parts. ``batch``: the function was called with lists of one element.

    Raises TypeError or ValueError when the result contains no finite score.
    """
    if batch:
        return Returned(_number(_only(result)))
    if not isinstance(result, dict):
        return Returned(_number(result))
    if "score" not in result:
        raise ValueError(f"returned a dict with {', '.join(map(str, result)) or 'nothing'}: {_REMEDY}")
    score = _number(result["score"])
    numbers = {str(key): _float(value) for key, value in result.items() if key != "score"}
    finite = {
        name: number for name, number in numbers.items() if number is not None and math.isfinite(number)
    }
    named = [name for name in finite if _PART_NAME.fullmatch(name)][:MOST_PARTS]
    left_out = finite.keys() - set(named)
    warning = _left_out(min(left_out), len(left_out)) if left_out else ""
    return Returned(score, {name: finite[name] for name in named}, warning)


def _left_out(name: str, count: int) -> str:
    return (
        f"returned {count} numbers beside 'score' that are left out, such as {name!r:.80}: return at most "
        f"{MOST_PARTS}, with names of up to 64 letters, digits, spaces, '_', '.' and '-'"
    )


def _only(result: Any) -> Any:
    values = result.tolist() if hasattr(result, "tolist") else result
    if not isinstance(values, list | tuple) or len(values) != 1:
        raise TypeError(f"returned {_shown(result)} for one completion: {_REMEDY_LIST}")
    if values[0] is None:
        # In TRL, None leaves a row to another reward function; a job here has only one.
        raise ValueError(
            "returned [None], but no other function judges the row: return a number, such as [0.0]"
        )
    return values[0]


def _number(value: Any) -> float:
    number = _float(value)
    if number is None:
        raise TypeError(f"returned {_shown(value)}: {_REMEDY}")
    if not math.isfinite(number):
        raise ValueError(f"returned {number}: {_REMEDY} that is finite")
    return number


def _float(value: Any) -> float | None:
    """Convert numbers, including NumPy's and PyTorch's scalars; return None for all else, even "1"."""
    try:
        return float(value) if hasattr(value, "__float__") else None
    except Exception:  # noqa: BLE001 - an array of several values, or a tensor without a value
        return None


def _shown(value: Any) -> str:
    return f"{value!r:.100} ({type(value).__name__})"
