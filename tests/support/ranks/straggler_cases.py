"""Functions that run on ranks: steps of a tiny policy whose own time is measured."""

import os
import time
from contextlib import nullcontext
from typing import Any

import torch.distributed as dist

from grpo_worker.profiling.own_time import OWN_TIME, measure_collectives
from grpo_worker.roles.trainer_models import rank_info
from support.ranks.policy_cases import batch, everywhere, make, own_rows, update
from support.slow_process import slowed


def own_times(layout: dict[str, int], count: int, slow: int) -> dict[str, Any]:
    """Return the coordinates, own times and durations of ``count`` steps, in which rank ``slow`` pauses."""
    measure_collectives(OWN_TIME)
    policy = make(layout)
    _step(policy, 0)  # the first one builds what all others use
    OWN_TIME.take()
    dist.barrier()
    times, seconds = [], []
    mine = dist.get_rank() == slow
    with slowed(os.getpid()) if mine else nullcontext() as pauses:
        for step in range(1, count + 1):
            began = time.perf_counter()
            _step(policy, step)
            seconds.append(time.perf_counter() - began)
            times.append(OWN_TIME.take())
    models: Any = type("Models", (), {"policy": policy})
    return {
        "info": rank_info(dist.get_rank(), models),
        "times": times,
        "seconds": seconds,
        "pauses": pauses.seen if pauses else 0,
    }


def _step(policy: Any, step: int) -> None:
    data = own_rows(batch(step))
    with OWN_TIME.phase("log_probs"):
        data["old_log_probs"] = data["ref_log_prob"] = everywhere(policy, data)
    with OWN_TIME.phase("update"):
        update(policy, data)
