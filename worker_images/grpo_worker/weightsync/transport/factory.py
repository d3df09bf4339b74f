"""By which way the members of a link reach each other."""

from typing import Any

import torch

from grpo_worker.weightsync.transport.cuda_ipc import CudaIpcGroup
from grpo_worker.weightsync.transport.process_group import CollectiveGroup
from grpo_worker.weightsync.transport.rendezvous import TransferGroup

IPC = "cuda-ipc"  # inside one host; every other backend is a process group


def join(
    backend: str, store: Any, name: str, rank: int, world: int, trainers: int, device: torch.device
) -> TransferGroup:
    """This process as member ``rank`` of the link ``name``, when all are there. Raises LinkError."""
    kind = CudaIpcGroup if backend == IPC else CollectiveGroup
    return kind(store, name, rank, world, trainers, device)
