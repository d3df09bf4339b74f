"""GPU memory that NCCL takes for a communicator: for its channels, and for each peer of an all-to-all.

    torchrun --nproc-per-node 4 benchmarks/gpu/nccl_memory.py nccl_memory.json
    torchrun --nproc-per-node 4 benchmarks/gpu/nccl_memory.py nccl_memory_network.json --network

Each communicator has 2 ranks or all of them, and is used for one kind of collective, which is what connects
its ranks. ``--network``: ranks talk over sockets as if each were on a host of its own, not over NVLink.
Recorded: how much less memory is free on the first rank's GPU after the collective than before the
communicator was made. CUDA's context and the collective's own tensors are not in it.
"""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import process_group
import torch
import torch.distributed as dist

from grpo_devcluster.results import stamp, write_raw

NETWORK = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
ELEMENTS = 2**24  # of each rank's tensor in bf16: large enough for NCCL's protocol of large messages
Group = Any


def _all_reduce(data: torch.Tensor, other: torch.Tensor, group: Group) -> None:
    dist.all_reduce(data, group=group)


def _all_gather(data: torch.Tensor, other: torch.Tensor, group: Group) -> None:
    part = data[: data.numel() // dist.get_world_size(group)]
    dist.all_gather_into_tensor(other[: part.numel() * dist.get_world_size(group)], part, group=group)


def _all_to_all(data: torch.Tensor, other: torch.Tensor, group: Group) -> None:
    dist.all_to_all_single(other, data, group=group)


def _send(data: torch.Tensor, other: torch.Tensor, group: Group) -> None:
    """Send to the next rank, as a stage of a pipeline and a link to an engine do."""
    ranks, here = dist.get_process_group_ranks(group), dist.get_rank(group)
    following, before = ranks[(here + 1) % len(ranks)], ranks[here - 1]
    sends = [dist.P2POp(dist.isend, data, following, group), dist.P2POp(dist.irecv, other, before, group)]
    for work in dist.batch_isend_irecv(sends):
        work.wait()


COLLECTIVES: dict[str, Callable[[torch.Tensor, torch.Tensor, Group], None]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "send": _send,
}


def taken(size: int, collective: str) -> int:
    """Return the bytes that a communicator of the first ``size`` ranks takes; 0 on other ranks."""
    ranks = list(range(size))
    data = torch.ones(ELEMENTS, dtype=torch.bfloat16, device="cuda")
    other = torch.empty_like(data)
    torch.cuda.synchronize()
    dist.barrier()
    before = torch.cuda.mem_get_info()[0]
    group = dist.new_group(ranks)
    if dist.get_rank() in ranks:
        for _ in range(3):
            COLLECTIVES[collective](data, other, group)
    torch.cuda.synchronize()
    dist.barrier()
    return before - torch.cuda.mem_get_info()[0]


def main() -> None:
    """Measure all communicators; the first rank writes the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("result", type=Path)
    parser.add_argument("--network", action="store_true")
    args = parser.parse_args()
    if args.network:
        os.environ.update(NETWORK)
    process_group.of_torchrun()
    dist.barrier()  # makes the communicator of all later barriers
    world = dist.get_world_size()
    cases: dict[str, Any] = {}
    for size in sorted({2, world}):
        for collective in COLLECTIVES:
            name = f"{collective} of {size}{' over the network' if args.network else ''}"
            cases[name] = {"ranks": size, "bytes": taken(size, collective)}
            if dist.get_rank() == 0:
                print(name, cases[name], flush=True)
    if dist.get_rank() == 0:
        write_raw(args.result, stamp(f"{world} x {torch.cuda.get_device_name()}"), cases=cases)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
