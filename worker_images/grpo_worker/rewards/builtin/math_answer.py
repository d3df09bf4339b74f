"""Mathematics: is the answer's last formula equal to the ground truth?"""

from typing import Any

from math_verify import parse, verify

from grpo_worker.rewards.builtin import GroundTruthError

_BOX, _HASHES = "\\boxed", "####"
_STEPS = 8  # two parses, at most four comparisons and some reserve share an answer's time


def compute_score(solution_str: str, ground_truth: Any, timeout_seconds: float) -> float:
    """Give 1 for a formula that equals the ground truth, 0 for another one or none.

    The last ``\\boxed{}`` counts, or what follows the last ``####`` as in GSM8K, or the last formula or
    number. A formula that takes too long to compare is wrong.
    """
    seconds = max(1, int(timeout_seconds / _STEPS))
    gold = parse(_gold(str(ground_truth)), parsing_timeout=seconds)
    if not gold:
        raise GroundTruthError(f"ground_truth={ground_truth!r:.200} holds no formula that math-verify reads")
    found = parse(_final(solution_str), parsing_timeout=seconds)
    return float(bool(found) and verify(gold, found, timeout_seconds=seconds))


def _gold(text: str) -> str:
    final = _final(text).strip()
    return final if _BOX in final or "$" in final else f"{_BOX}{{{final}}}"


def _final(text: str) -> str:
    """Cut off what comes before the final answer: math-verify would join all boxes to a set."""
    box, hashes = text.rfind(_BOX), text.rfind(_HASHES)
    if box > hashes:
        return text[box:]
    return text[hashes + len(_HASHES) :].strip().partition("\n")[0] if hashes >= 0 else text
