"""Figures of a case of sync.py (pure)."""

import statistics
from typing import Any

_NOISE = 10  # answers with other weights differ by as many times more than those with equal ones


def check_equal(found: dict[str, Any]) -> None:
    """Raise AssertionError if a flag that says that weights are equal is false."""
    flags = (
        *("same_as_first", "same_after_rejoin", "same_when_buffered"),
        *("same_weights", "same_answer", "same_quantisation"),
    )
    unequal = [flag for flag in flags if found.get(flag) is False]
    assert not unequal, f"the weights differ: {unequal}"


def same_answer(found: list[float], equal: list[float], other: list[float]) -> bool:
    """Return whether log-probabilities are those of equal weights, beside those of other weights."""

    def apart(answer: list[float]) -> float:
        return max(abs(a - b) for a, b in zip(found, answer, strict=True))

    return _NOISE * apart(equal) < apart(other)


def figures(found: dict[str, Any], bucket: int) -> dict[str, float]:
    """Return the figures of one case: medians of the rounds after the first two.

    ``extra_memory_buckets``: as the engine measures it; without that, the buffers of its plan.
    ``rejoin_over_version``: an engine that joins again, with its first version, beside one version.
    ``buffered_...``: with a double buffer.
    """
    first, rounds, rejoin = found["rounds"][0], found["rounds"][2:], found["rejoin"]
    middle = {part: statistics.median(r[part] for r in rounds) for part in rounds[0]}
    result = {
        f"{part}_seconds": middle[part] for part in ("pause", "trainer", "engine_receive_and_load", "whole")
    }
    result |= {"gigabytes": found["bytes"] / 1e9, "tensors": found["tensors"]}
    result["gigabytes_per_second"] = result["gigabytes"] / middle["engine_receive_and_load"]
    result["first_seconds"] = first["pause"]
    result["first_over_later"] = first["whole"] / middle["whole"]
    result["rejoin_over_version"] = (rejoin["join"] + rejoin["whole"]) / middle["whole"]
    result["extra_memory_buckets"] = found["told"].get("extraBytes", found["buffer_bytes"]) / bucket
    result["trainer_extra_memory_buckets"] = found["trainer_extra_bytes"] / bucket
    result["raw_seconds"] = found["raw"]
    result["bytes_ratio_vs_nccl"] = found["raw"] / middle["engine_receive_and_load"]
    result["pause_ratio"] = found["raw"] / middle["pause"]
    buffered = {
        part: statistics.median(r[part] for r in found["buffered"][2:]) for part in ("pause", "whole")
    }
    result |= {f"buffered_{part}_seconds": seconds for part, seconds in buffered.items()}
    result["buffered_pause_ratio"] = found["raw"] / buffered["pause"]
    if "per_tensor" in found:
        plain = statistics.median(found["per_tensor"][1:])
        result |= {"per_tensor_seconds": plain, "speedup_vs_per_tensor": plain / middle["pause"]}
    return result
