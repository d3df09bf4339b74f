"""By which way the members of a link reach each other."""

from typing import Any

import torch

from grpo_worker.weightsync.transport.cuda_ipc import Neighbours
from grpo_worker.weightsync.transport.process_group import Peers
from grpo_worker.weightsync.transport.rendezvous import Members

IPC = "cuda-ipc"  # inside one host; every other backend is a process group


def join(
    backend: str, store: Any, name: str, rank: int, world: int, trainers: int, device: torch.device
) -> Members:
    """This process as member ``rank`` of the link ``name``, when all are there. Raises LinkError."""
    kind = Neighbours if backend == IPC else Peers
    return kind(store, name, rank, world, trainers, device)
