"""Comparison of the gradients of two layouts."""

from collections.abc import Mapping

import torch


def largest_gap(
    actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> tuple[float, str]:
    """Return the largest difference relative to the largest entry of its tensor, and the tensor's name.

    The experts' bias is left out: the load balancing moves it, not a gradient. Raises AssertionError if one
    side has other tensors, or a tensor with an entry that is not finite: ``max`` would pass over NaN, and NaN
    also marks the parts of a tensor that no rank owns.
    """
    assert actual.keys() == expected.keys(), actual.keys() ^ expected.keys()
    gaps = []
    for name, whole in expected.items():
        if name.endswith("e_score_correction_bias"):
            continue
        for side, tensor in (("actual", actual[name]), ("expected", whole)):
            bad = int((~tensor.isfinite()).sum())
            assert not bad, f"{name}: {bad} of {tensor.numel()} {side} entries are not finite"
        gap = float((actual[name] - whole).abs().max() / whole.abs().max().clamp(min=1e-12))
        gaps.append((gap, name))
    return max(gaps)
