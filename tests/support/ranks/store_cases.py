"""Functions that run on ranks: real trainer ranks that publish versions and save checkpoints."""

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist

from grpo_worker.checkpointing.store import complete
from grpo_worker.weightsync.protocol.version import Version
from support.ranks.policy_cases import train


def train_and_save(
    weights: str, store: str, spec: dict[str, Any], hf: dict[str, Any], last: int, every: int, attempt: int
) -> list[str]:
    """Start from the newest checkpoint in ``store``, and train up to step ``last``.

    Each step's version, also that of the start, is published in memory at ``weights``; a checkpoint is saved
    every ``every`` steps, and training goes on while it is written. Returns the digests of this rank's
    versions.
    """
    os.environ["GRPO_WEIGHTS_DIR"] = weights
    from grpo_worker.roles.trainer import TrainerWorker

    rank, world, root = dist.get_rank(), dist.get_world_size(), f"{store}/checkpoints"
    worker = TrainerWorker()
    worker._rank, worker._world = rank, world
    config = {"spec": spec, "hf": hf, "checkpoints": root, "attempt": attempt}
    worker.rank_info = worker._build(rank, world, config)
    found = complete(Path(root))
    first = max(found, default=0)
    if first:
        worker.load_checkpoint(str(found[first]))
    digests = [worker.publish_weights(Version(first), False, False)]
    for step in range(first + 1, last + 1):
        train(worker._models.policy, range(step, step + 1))
        digests.append(worker.publish_weights(Version(step), False, False))
        if step % every == 0:
            worker.save_checkpoint(step, {"step": step})
    worker.poll_checkpoint(True)
    return digests
