"""Own time of two ranks over NCCL: python3 benchmarks/gpu/own_time.py OUT_FILE, on two GPUs.

Rank 1 computes three times as much, or its host sleeps; collectives in both passes make the ranks equally
long. Writes for each case the duration and the own time of both ranks, and what measuring a collective costs.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

sys.path.insert(0, str(Path(__file__).parents[2] / "worker_images"))
from grpo_worker.profiling.own_time import OWN_TIME, measure_collectives

_LAYERS, _PRODUCTS, _SMALL = 8, 16, 2000
_SLOW_HOST = 0.02  # seconds for each layer
CASES = ("calm", "slow kernels", "slow host", "slow kernels beside collectives")


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(torch.ones(1 << 20, device="cuda"))
        return inputs.clone()

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(torch.ones(1 << 20, device="cuda"))
        return gradient


def _step(weights: torch.Tensor, case: str) -> None:
    slow = dist.get_rank() == 1
    products = _PRODUCTS * (3 if slow and "kernels" in case else 1)
    works, values = [], weights
    for _ in range(_LAYERS):
        for _ in range(products):
            values = (values @ weights) * 0.01
        values = _Sum.apply(values)
        if slow and case == "slow host":
            time.sleep(_SLOW_HOST)
        if "beside" in case:
            works.append(dist.all_reduce(torch.ones(1 << 22, device="cuda"), async_op=True))
    values.float().sum().backward()  # type: ignore[no-untyped-call]
    for work in works:
        work.wait()


def _small_collectives() -> float:
    """Return the microseconds of one small collective."""
    tensor = torch.ones(16, device="cuda")
    dist.barrier()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(_SMALL):
        dist.all_reduce(tensor)
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / _SMALL * 1e6


def _run(rank: int, out: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555"}
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=2)
    weights = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for case in CASES:
        _step(weights, case)
    bare = _small_collectives()
    measure_collectives(OWN_TIME)
    with OWN_TIME.phase("update"):
        measured = _small_collectives()
    OWN_TIME.take()
    found: dict[str, Any] = {"microseconds_bare": bare, "microseconds_measured": measured}
    for case in CASES:
        dist.barrier()
        torch.cuda.synchronize()
        began = time.perf_counter()
        with OWN_TIME.phase("update"):
            _step(weights, case)
        found[case] = {"seconds": time.perf_counter() - began, "own": OWN_TIME.take().update}
    ranks: list[Any] = [None, None]
    dist.all_gather_object(ranks, found)
    if rank == 0:
        Path(out).write_text(json.dumps({"torch": torch.__version__, "ranks": ranks}, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    spawn(_run, args=(sys.argv[1],), nprocs=2)  # type: ignore[no-untyped-call]
