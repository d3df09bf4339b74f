"""State of Adam, which torch and Transformer Engine keep in different ways.

torch's Adam has a step for each parameter, a tensor. Transformer Engine's FusedAdam has one for each
parameter group, an integer. Both have moments with the same names, in fp32 unless FusedAdam is
precision-aware. Megatron-Core uses FusedAdam wherever Transformer Engine can be imported.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from grpo_worker.megatron.optim import precision_aware

_Optimizer = torch.optim.Optimizer


def initialize(optimizer: _Optimizer) -> None:
    """Create the state of all parameters, which is empty before the first step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if optimizer.state[parameter]:
                continue
            if precision_aware.is_precision_aware(optimizer):
                precision_aware.initialize(optimizer, parameter)
            else:
                optimizer.state[parameter].update(_zeros(optimizer, parameter))


def _zeros(optimizer: _Optimizer, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    moments = {name: torch.zeros_like(parameter) for name in precision_aware.MOMENTS}
    return moments | ({"step": torch.tensor(0.0)} if _is_torchs(optimizer) else {})


def share_step(optimizers: Sequence[_Optimizer]) -> None:
    """Give optimizers without parameters the step of a sibling optimizer.

    Megatron-Core reads Adam's step from the parameters, but on a stage without experts their optimizer has
    no parameters. The step that rank 0 saves is used for all ranks.
    """
    steps = [state["step"] for o in optimizers if _is_torchs(o) for state in o.state.values()]
    for optimizer in optimizers:
        if steps and not any(group["params"] for group in optimizer.param_groups):
            optimizer.state["no parameters"] = {"step": steps[0].detach().clone()}  # type: ignore[index]


def unshare_step(optimizer: _Optimizer) -> None:
    """Give each parameter its own step tensor.

    Megatron-Core assigns all parameters the same one, to which torch's Adam would add 1 for each parameter.
    """
    for state in optimizer.state.values():
        if "step" in state:
            state["step"] = state["step"].detach().clone()


def saved_fields(groups: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the step and the learning rate in saved parameter groups, of whichever Adam."""
    with_step = [group for group in groups if group.get("step") is not None]
    if not with_step:
        raise ValueError("the checkpoint has no step of the optimizer")
    return {"step": int(with_step[0]["step"]), "lr": with_step[0]["lr"]}


def _is_torchs(optimizer: _Optimizer) -> bool:
    return isinstance(optimizer, torch.optim.Adam)
