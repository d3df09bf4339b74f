"""A trainer and engines that disagree are told, with the figure and the place."""

import pytest
import torch
from tensordict import TensorDict

from grpo_worker.controller.parity import ParityError, check_log_probs


def _batch(gap: float) -> TensorDict:
    mask = torch.tensor([[0.0, 1, 1], [0, 1, 0]])
    engine = torch.tensor([[0.0, -1, -2], [0, -3, -9]])
    trainer = engine.clone()
    trainer[0, 2] += gap
    trainer[1, 2] += 100  # outside the response
    columns = {"response_mask": mask, "old_log_probs": trainer, "rollout_log_probs": engine}
    return TensorDict(columns, batch_size=[2])


def test_a_small_gap_passes() -> None:
    check_log_probs(_batch(0.29), 0.1)


@pytest.mark.parametrize("gap", [0.31, -5.0, float("nan"), float("inf")])
def test_a_large_one_is_refused(gap: float) -> None:
    with pytest.raises(ParityError, match=r"maxLogProbGap=0\.1 .* at sample 0, token 2"):
        check_log_probs(_batch(gap), 0.1)
