"""State of a checkpoint that is read from host memory, while other processes use the GPUs.

Offloaded tensors have no storage on the device, and stay there: ranks need no GPU memory, but they exchange
their parts of the optimizer state over gloo, which is slower than NCCL.
"""

from typing import Any

from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from grpo_worker.megatron.optim.offload import HostCopies


def replace_tensors(state: dict[str, Any], copies: HostCopies) -> None:
    """Replace offloaded tensors of a state by views of their copies."""

    def replaced(entry: Any) -> Any:
        if isinstance(entry, ShardedTensor | ShardedTensorFactory) and entry.data is not None:
            entry.data = copies.of(entry.data)
        return entry

    dict_list_map_inplace(replaced, state)
