"""Advantage estimators (numpy, on the controller)."""

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


def group_normalised(scores: FloatArray, by_std: bool = True, eps: float = 1e-6) -> FloatArray:
    """GRPO's outcome advantage (arXiv 2402.03300, eq. 3; without the division: Dr.GRPO).

    scores: [prompts, n] scalar rewards. Returns [prompts, n]: score minus the group's mean,
    divided by the group's sample standard deviation + eps when ``by_std``.
    Raises ValueError for groups of one, whose baseline would be the sample itself.
    """
    if scores.ndim != 2 or scores.shape[1] < 2:
        raise ValueError(f"scores must be [prompts, n] with n >= 2, got shape {scores.shape}")
    centred: FloatArray = scores - scores.mean(axis=1, keepdims=True)
    if not by_std:
        return centred
    deviation: FloatArray = scores.std(axis=1, ddof=1, keepdims=True)
    normalised: FloatArray = centred / (deviation + eps)
    return normalised
