"""State of a checkpoint that is read from host memory, while other processes use the GPUs.

Offloaded tensors have no storage on the device, and stay there: ranks need no GPU memory, but they exchange
their parts of the optimizer state over gloo, which is slower than NCCL.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from grpo_worker.megatron.optim.offload import HostCopies

# Megatron-Core gathers the optimizer state over gloo, on the first data-parallel rank only. The files of a
# checkpoint are those of any other, and it is loaded in the same way.
OVER_GLOO = {"distrib_optim_fully_reshardable_mem_efficient": True}
_READ = "_get_main_param_and_optimizer_states"


@contextmanager
def reading(optimizers: Iterable[Any], copies: HostCopies) -> Iterator[None]:
    """Let Megatron-Core's distributed optimizers read their state from the copies."""
    patched = [optimizer for optimizer in optimizers if hasattr(optimizer, _READ)]
    for optimizer in patched:
        setattr(optimizer, _READ, partial(_read, getattr(optimizer, _READ), copies))
    try:
        yield
    finally:
        for optimizer in patched:
            delattr(optimizer, _READ)  # that of the class is back


def replace_tensors(state: dict[str, Any], copies: HostCopies) -> None:
    """Replace offloaded tensors of a state by views of their copies."""

    def replaced(entry: Any) -> Any:
        if isinstance(entry, ShardedTensor | ShardedTensorFactory) and entry.data is not None:
            entry.data = copies.of(entry.data)
        return entry

    dict_list_map_inplace(replaced, state)


def _read(original: Callable[[Any], dict[str, Any]], copies: HostCopies, parameter: Any) -> dict[str, Any]:
    found = original(parameter)
    return {key: copies.of(value) if torch.is_tensor(value) else value for key, value in found.items()}
