"""Updates of data-parallel ranks with collectives beside the passes, and without.

    torchrun --nproc-per-node 2 benchmarks/gpu/overlap_speed.py overlap.json

Both train kernel_models.SLICE (2.4 B parameters) from the same weights with deterministic kernels. Recorded:
seconds of an update, of three in a row, and whether the weights have the same bits afterwards, as they have
after the same updates repeated. Gradients are not clipped, because the last bits of their norm depend on the
buckets.
Needs transformer_engine and megatron-core on PYTHONPATH beside operator, worker_images and devcluster.
"""

import argparse
import os
import statistics
from pathlib import Path
from typing import Any

os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")

import process_group
import torch
import torch.distributed as dist
from kernel_models import BF16, ENGINE, SLICE, discard, free, seconds, setup
from trainer_speed import rows_of

from grpo_devcluster.results import stamp, write_raw
from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.api.v1alpha1.optimizer import OptimizerSpec
from grpo_worker.algorithms.losses import PolicyLossConfig
from grpo_worker.megatron.model.build import initialize_parallel
from grpo_worker.megatron.optim import data_parallel
from grpo_worker.megatron.training.policy import PolicyModel

TOKENS, ROWS, IN_A_ROW, ROUNDS = 2048, 4, 3, 5


def measure(layout: Layout, overlap: bool) -> tuple[dict[str, Any], list[int]]:
    """Return the figures, and a sum of each weight's bits."""
    data_parallel.OVERLAP = overlap
    free()
    optimizer = OptimizerSpec(lr=1e-5, clip_grad=1000)
    model = PolicyModel(
        setup(SLICE, (ENGINE, BF16), layout=layout), optimizer, 100, with_reference=False
    )  # fmt: skip
    rows = rows_of([TOKENS] * ROWS, ROWS, SLICE["vocab_size"])

    def updates() -> None:
        for _ in range(IN_A_ROW):
            model.update(rows, PolicyLossConfig(), 0.001, 1.0)

    updates()
    taken = statistics.median(seconds(updates) for _ in range(ROUNDS)) / IN_A_ROW
    groups = sum(
        len(ddp.bucket_groups) + len(ddp.expert_parallel_bucket_groups) for ddp in model.trainable.ddp
    )
    with model.trainable.weights.on_device():
        bits = [
            int(shard.tensor.detach().reshape(-1).view(torch.int16).sum(dtype=torch.int64))
            for shard in model.held_shards()
        ]
    discard(model)
    return {"update_seconds": taken, "buckets": groups}, bits


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("result", type=Path)
    args = parser.parse_args()
    process_group.of_torchrun()
    layout = Layout(world=dist.get_world_size())
    initialize_parallel(layout, 1)
    found: dict[str, Any] = {}
    found["one after the other"], plain = measure(layout, overlap=False)
    found["same_bits_repeated"] = measure(layout, overlap=False)[1] == plain
    found["beside the passes"], beside = measure(layout, overlap=True)
    found["same_bits"] = plain == beside
    if dist.get_rank() == 0:
        print(found, flush=True)
        write_raw(
            args.result, stamp(f"{dist.get_world_size()} x {torch.cuda.get_device_name()}"), cases=found
        )  # fmt: skip
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
