"""Creation of a transfer group for a backend."""

from typing import Any

import torch

from grpo_operator.api.weight_path import Backend
from grpo_worker.weightsync.transport.cuda_ipc import CudaIpcGroup
from grpo_worker.weightsync.transport.process_group import CollectiveGroup
from grpo_worker.weightsync.transport.rendezvous import TransferGroup


def join(
    backend: Backend, store: Any, name: str, rank: int, world: int, trainers: int, device: torch.device
) -> TransferGroup:
    """Join the transfer group ``name`` as member ``rank``; returns when all members have joined.

    Raises TransferError.
    """
    if backend is Backend.CUDA_IPC:
        return CudaIpcGroup(store, name, rank, world, trainers, device)
    return CollectiveGroup(backend, store, name, rank, world, trainers, device)
