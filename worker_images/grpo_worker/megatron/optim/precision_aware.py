"""State of Megatron-Core's precision-aware optimizer, which Transformer Engine's FusedAdam keeps.

Moments are bf16 or fp32. The state has only 16 bits of an fp32 main weight: by how much its magnitude, as an
integer, differs from that of the bf16 weight, which is the rounded main weight.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

MOMENTS = ("exp_avg", "exp_avg_sq")
MAIN = "master_param"  # FusedAdam's name
_MAGNITUDE, _MAGNITUDE16 = 0x7FFFFFFF, 0x7FFF

Contents = Callable[[torch.Tensor], torch.Tensor]


def is_precision_aware(optimizer: Any) -> bool:
    """Return whether an optimizer inside Megatron-Core's is a FusedAdam that keeps the main weights."""
    return bool(getattr(optimizer, "master_weights", False))


def prepare(optimizer: Any) -> None:
    """Let the state dict have the state as it is: FusedAdam's own would have fp32 copies of all of it."""
    if is_precision_aware(optimizer):
        optimizer.state_dict = partial(torch.optim.Optimizer.state_dict, optimizer)


def initialize(optimizer: Any, parameter: torch.Tensor) -> None:
    """Create the state of a parameter."""
    optimizer.initialize_state(
        parameter, optimizer.store_param_remainders and parameter.dtype is torch.bfloat16
    )


def read(optimizer: Any, parameter: torch.Tensor, contents: Contents) -> dict[str, torch.Tensor]:
    """Return a parameter's moments, and its main weights as ``param``, in fp32.

    ``contents``: returns where a tensor's values are.
    """
    state = optimizer.state[parameter]
    found = {name: contents(state[name]).float() for name in MOMENTS}
    return found | {"param": main_weights(contents(parameter), contents(state[MAIN]))}


@torch.no_grad()
def write(optimizer: Any, parameter: torch.Tensor, values: Mapping[str, torch.Tensor]) -> None:
    """Set what ``read`` returns. The weights themselves do not change."""
    state = optimizer.state[parameter]
    for name in MOMENTS:
        state[name].copy_(values[name])
    whole = state[MAIN].dtype is torch.float32
    state[MAIN].copy_(values["param"] if whole else remainders(values["param"], parameter.detach()))


def main_weights(weights: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Return fp32 main weights. ``kept``: int16 remainders of the bf16 weights, or the main weights."""
    if kept.dtype is torch.float32:
        return kept
    return ((weights.view(torch.int16).int() << 16) + kept.int()).view(torch.float32)


def remainders(main: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return what bf16 weights lack of fp32 main weights, int16.

    A main weight halfway between two bf16 values becomes the next one towards the weight, if that is the
    smaller value: Transformer Engine rounds up there, and PyTorch to even values.
    """
    magnitude = (weights.view(torch.int16).int() & _MAGNITUDE16) << 16
    difference = (main.view(torch.int32) & _MAGNITUDE) - magnitude
    return difference.clamp(-(2**15), 2**15 - 1).short()
