"""Functions that run on ranks: real trainer ranks that publish versions and save checkpoints."""

import os
from typing import Any

import torch.distributed as dist

from grpo_worker.checkpointing.store import complete_steps
from support.ranks.policy_cases import train


def train_and_save(
    weights: str, store: str, spec: dict[str, Any], hf: dict[str, Any], steps: int, every: int
) -> list[list[int]]:
    """Train, publish each step's version in memory at ``weights``, and save every ``every`` steps in ``store``.

    Training goes on while a checkpoint is written. Returns the steps with a complete one after each step.
    """
    os.environ["GRPO_WEIGHTS_DIR"] = weights
    from grpo_worker.roles.trainer import TrainerWorker

    worker, root = TrainerWorker(), f"{store}/checkpoints"
    worker._rank, worker._world = dist.get_rank(), dist.get_world_size()
    worker.rank_info = worker._build(
        worker._rank, worker._world, {"spec": spec, "hf": hf, "checkpoints": root}
    )
    complete = []
    for step in range(1, steps + 1):
        train(worker._models.policy, range(step, step + 1))
        worker.publish_weights(step, False, False)
        if step % every == 0:
            worker.poll_checkpoint(True)
            worker.save_checkpoint(step, {"step": step})
        complete.append(complete_steps(root))
    worker.poll_checkpoint(True)
    return [*complete, complete_steps(root)]
