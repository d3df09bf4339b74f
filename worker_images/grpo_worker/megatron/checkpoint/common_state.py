"""State that all ranks have in common, such as the schedule: neither a tensor nor an object of one rank."""

from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.utils import extract_nonpersistent, extract_sharded_base


def write_common_state(state: dict[str, Any], folder: Path) -> None:
    """Write the file of the common state, which every version of Megatron-Core reads, if it is missing.

    Later versions than 0.16.1 keep that state among the tensors, where 0.16.1 does not look for it.
    ``state``: as dist_checkpointing.save takes it.
    """
    file = folder / COMMON_STATE_FNAME
    if not file.exists():
        _, persistent = extract_nonpersistent(state)
        _, common = extract_sharded_base(persistent)
        torch.save(common, file)
