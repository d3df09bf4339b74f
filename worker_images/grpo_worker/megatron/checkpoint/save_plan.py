"""Plan of a checkpoint: which rank writes what. It is the same in all checkpoints of a process."""

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy


class SavePlan:
    """Megatron-Core's strategy for saving, which gathers the plan on rank 0 in the first two saves only.

    Gathering it takes longer than copying the state once there are hundreds of ranks.
    """

    def __init__(self) -> None:
        self.strategy = TorchDistSaveShardedStrategy("torch_dist", 1, cached_metadata=True)
        self.settled = False

    def settle(self) -> None:
        """Use the plan of the last two saves from now on, if they had the same on all ranks. Collective."""
        if self.settled:
            return
        device = "cuda" if torch.cuda.is_available() else "cpu"
        same = torch.tensor(int(self.strategy.validated_cache_reuse), device=device)
        dist.all_reduce(same, dist.ReduceOp.MIN)
        self.settled = self.strategy.validated_cache_reuse = bool(same)
