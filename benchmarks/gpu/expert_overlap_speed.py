"""Updates with and without trainer.moe.overlapCommunication, with experts spread over the GPUs of a host.

    CUDA_DEVICE_MAX_CONNECTIONS=32 torchrun --nproc-per-node 4 benchmarks/gpu/expert_overlap_speed.py FILE

Each rank has as many of DeepSeek-V3's experts as one of 32 ranks has. Both ways compute the same update from
the same weights, whose gradient's norm must be as near as rounding allows, and then take the time of others.
Needs transformer_engine and megatron-core on PYTHONPATH beside operator, worker_images and devcluster.
"""

import argparse
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import process_group
import torch
import torch.distributed as dist
from kernel_models import BF16, ENGINE, FP8, LOCAL, SLICE, Kind, discard, seconds, setup
from megatron.core import parallel_state
from trainer_speed import rows_of

from grpo_devcluster.results import stamp, write_raw
from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.api.v1alpha1.moe import MoeSpec, TokenDispatcher
from grpo_operator.api.v1alpha1.optimizer import OptimizerSpec
from grpo_worker.algorithms.losses import PolicyLossConfig
from grpo_worker.megatron.model.build import initialize_parallel
from grpo_worker.megatron.training.policy import PolicyModel

KINDS: dict[str, Kind] = {
    "local": (LOCAL, BF16), "transformer_engine": (ENGINE, BF16), "fp8": (ENGINE, FP8),
}  # fmt: skip
EXPERTS_OF_RANK = 8
TOKENS, ROWS, ROUNDS = 4096, 8, 5  # rows are micro-batches


def measured(kind: Kind, overlap: bool) -> dict[str, Any]:
    """Return the gradient norm of the first update, the seconds of the others, and the peak of memory."""
    world = dist.get_world_size()
    layout = Layout(world, expert=world)
    initialize_parallel(layout, 1)
    moe = MoeSpec(dispatcher=TokenDispatcher.ALLTOALL, overlap_communication=overlap)
    hf = SLICE | {"n_routed_experts": EXPERTS_OF_RANK * world}
    model = PolicyModel(
        replace(setup(hf, kind, layout=layout), moe=moe), OptimizerSpec(lr=1e-5), 100, with_reference=False
    )  # fmt: skip
    batch = rows_of([TOKENS] * ROWS, 7 + dist.get_rank(), hf["vocab_size"])
    found: dict[str, Any] = {}

    def update() -> None:
        found.setdefault("norm", model.update(batch, PolicyLossConfig(), 0.001, 1.0)["actor/grad_norm"])

    update()
    update()  # the first one compiles kernels, the second one allocates
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(ROUNDS):
        dist.barrier()
        times.append(seconds(update))
    found |= {"seconds": times, "peak_gb": torch.cuda.max_memory_allocated() / 1e9}
    discard(model)
    parallel_state.destroy_model_parallel()
    return found


def compared(kind: Kind) -> dict[str, Any]:
    plain, overlapped = measured(kind, overlap=False), measured(kind, overlap=True)
    return {
        "plain": plain,
        "overlapped": overlapped,
        "ratio": statistics.median(plain["seconds"]) / statistics.median(overlapped["seconds"]),
        "grad_norm": overlapped["norm"] / plain["norm"],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("result", type=Path)
    args = parser.parse_args()
    process_group.of_torchrun()
    found: dict[str, Any] = {}
    for name, kind in KINDS.items():
        found[name] = compared(kind)
        if dist.get_rank() == 0:
            print(name, found[name], flush=True)
            write_raw(
                args.result, stamp(f"{dist.get_world_size()} x {torch.cuda.get_device_name()}"), cases=found
            )  # fmt: skip
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
