"""Agreement of all ranks of an engine about the outcome of a load."""

from typing import Any

import torch.distributed as dist


def gather(value: Any) -> list[Any]:
    """Return the value of every rank of the engine."""
    from sglang.srt.distributed import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return [value]
    values = [None] * group.world_size
    dist.all_gather_object(values, value, group=group.cpu_group)
    return values


def first_problem(problem: str) -> str:
    """Return the first problem of any rank of the engine, or an empty text: all ranks fail together."""
    problems = [f"rank {rank}: {text}" for rank, text in enumerate(gather(problem)) if text]
    return problems[0] if problems else ""
