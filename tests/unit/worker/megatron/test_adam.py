"""State of torch's Adam and of one that keeps its step in the groups, as Transformer Engine's does."""

from typing import Any

import pytest
import torch

from grpo_worker.megatron.optim import adam


def _torchs(size: int = 3) -> torch.optim.AdamW:
    return torch.optim.AdamW([torch.nn.Parameter(torch.ones(size))])


class _StepInGroups(torch.optim.Optimizer):
    """Stand-in for FusedAdam: it has no steps of parameters, and computes nothing."""

    def __init__(self) -> None:
        super().__init__([torch.nn.Parameter(torch.ones(3))], {"lr": 1e-3, "bias_correction": True})


def test_only_torchs_adam_gets_a_step_for_each_parameter() -> None:
    for optimizer, names in (
        (_torchs(), {"step", "exp_avg", "exp_avg_sq"}),
        (_StepInGroups(), {"exp_avg", "exp_avg_sq"}),
    ):
        adam.initialize(optimizer)
        (state,) = optimizer.state.values()
        assert state.keys() == names and not state["exp_avg"].any()


def test_existing_moments_stay() -> None:
    optimizer = _torchs()
    optimizer.param_groups[0]["params"][0].grad = torch.ones(3)
    optimizer.step()
    adam.initialize(optimizer)
    (state,) = optimizer.state.values()
    assert state["step"] == 1 and state["exp_avg"].all()


@pytest.mark.parametrize("step", [7, 7.0])
def test_the_step_is_read_from_whichever_group_has_it(step: float) -> None:
    groups: list[dict[str, Any]] = [{"lr": 1.0, "params": []}, {"lr": 2.0, "step": step}]
    found = adam.saved_fields(groups)
    assert found == {"step": 7, "lr": 2.0} and type(found["step"]) is int


def test_a_checkpoint_without_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match="no step of the optimizer"):
        adam.saved_fields([{"lr": 1.0}])
