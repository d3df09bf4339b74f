"""How far gradients of two layouts are apart."""

from collections.abc import Mapping

import torch


def largest_gap(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> tuple[float, str]:
    """(difference relative to the largest entry of its tensor, name of the tensor), the worst of all.

    The experts' bias is left out: it moves by a rule of its own, not by a gradient. Raises
    AssertionError when one side has other tensors.
    """
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    gaps = [
        (float((found[name] - whole).abs().max() / whole.abs().max().clamp(min=1e-12)), name)
        for name, whole in expected.items()
        if not name.endswith("e_score_correction_bias")
    ]
    return max(gaps)
