"""The range of a parameter's optimizer state that this rank keeps, in fp32 as checkpoints have it."""

from collections.abc import Mapping
from typing import Any

import torch

from grpo_worker.megatron.optim import precision_aware
from grpo_worker.megatron.optim.offload import HostCopies

NAMES = ("param", *precision_aware.MOMENTS)


def read(optimizer: Any, parameter: torch.Tensor, copies: HostCopies) -> dict[str, torch.Tensor]:
    """Return main weights and moments by ``NAMES``. ``copies``: of what is offloaded.

    ``optimizer``: Megatron-Core's distributed optimizer. ``parameter``: of the model.
    """
    inner = optimizer.optimizer
    if precision_aware.is_precision_aware(inner):
        return precision_aware.read(inner, _range(optimizer, parameter), copies.of)
    found = optimizer._get_main_param_and_optimizer_states(parameter)
    return {name: copies.of(found[name]) for name in NAMES}


def write(optimizer: Any, parameter: torch.Tensor, values: Mapping[str, torch.Tensor]) -> None:
    """Set the state to values that ``read`` has returned and the caller has changed."""
    if precision_aware.is_precision_aware(optimizer.optimizer):
        precision_aware.write(optimizer.optimizer, _range(optimizer, parameter), values)


def _range(optimizer: Any, parameter: torch.Tensor) -> torch.Tensor:
    """Return the optimizer's parameter, a view of this rank's range of the model's."""
    group, order = optimizer.model_param_group_index_map[parameter]
    own: torch.Tensor = optimizer.optimizer.param_groups[group]["params"][order]
    return own
