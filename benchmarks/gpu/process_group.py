"""The process group of a benchmark's ranks, each with a GPU of its own."""

import os

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from grpo_operator.api.v1alpha1.layout import Layout
from grpo_worker.megatron.model.build import initialize_parallel


def alone() -> None:
    """Be the only rank, on the first GPU."""
    torch.cuda.set_device(0)
    store = TCPStore("127.0.0.1", 0, 1, is_master=True)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    initialize_parallel(Layout(world=1), 1)


def of_torchrun() -> None:
    """Join the ranks that torchrun has started."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
