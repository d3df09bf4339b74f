"""Length penalty of scores (torch, on the controller)."""

import torch

from grpo_operator.api.v1alpha1.algorithm import OverlongSpec


def overlong_penalty(lengths: torch.Tensor, response_length: int, spec: OverlongSpec) -> torch.Tensor:
    """Return DAPO's soft overlong punishment (arXiv 2503.14476, section 3.4).

    It is 0 up to the buffer and then falls linearly to -penalty. lengths: [rows] response tokens. Returns
    [rows].
    """
    over = lengths.double() - (response_length - spec.buffer_length)
    return -(over / spec.buffer_length).clamp(min=0, max=1) * spec.penalty
