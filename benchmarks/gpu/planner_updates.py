"""Seconds and memory of the trainer's own updates on one GPU, for the planner's estimates.

    python benchmarks/gpu/planner_updates.py updates-fitted.json fitted
    python benchmarks/gpu/planner_updates.py updates-held-out.json held-out

The cases are those of update_cases.py. Each one trains with the product's policy, whose optimizer is the
fused Adam of Transformer Engine. Needs transformer_engine and megatron-core on PYTHONPATH beside operator,
worker_images and devcluster.
"""

import argparse
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import process_group
import torch
from host_speed import launch_seconds
from kernel_models import discard, free, policy, seconds
from trainer_speed import rows_of
from update_cases import FITTED, HELD_OUT, MICRO_BATCHES, UpdateCase

from grpo_devcluster.results import stamp, write_raw
from grpo_worker.algorithms.losses import PolicyLossConfig

ROUNDS, WARM_UP = 8, 2


def measure(case: UpdateCase) -> dict[str, Any]:
    """Return seconds of updates, bytes of weights, gradients and optimizer, and the peak of an update.

    ``seconds``: the least, because what else the host does only adds to it; ``seconds_longest``.
    ``gpu_seconds``, ``kernels``: of one update. ``launch_seconds``: of the host, just after the updates.
    """
    free()
    before = torch.cuda.memory_allocated()
    model = policy(case.hf, (case.kernels, case.precision), layout=case.layout, recompute=case.recomputed)
    batch = rows_of([case.tokens] * MICRO_BATCHES, 4, case.hf["vocab_size"])

    def update() -> object:
        return model.update(batch, PolicyLossConfig(), 0.001, 1.0)

    for _ in range(WARM_UP):
        update()
    free()
    state = torch.cuda.memory_allocated() - before
    torch.cuda.reset_peak_memory_stats()
    taken = [seconds(update) for _ in range(ROUNDS)]
    peak = torch.cuda.max_memory_allocated() - before
    busy = _on_gpu(update)
    discard(model)
    return busy | {
        "seconds": min(taken), "seconds_longest": max(taken), "state": state, "peak": peak,
        "launch_seconds": launch_seconds(),
    }  # fmt: skip


def _on_gpu(update: Callable[[], object]) -> dict[str, float]:
    """Return the seconds that the GPU computes in an update, and the number of kernels."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        seconds(update)
    rows = trace.key_averages()
    return {
        "gpu_seconds": sum(row.self_device_time_total for row in rows) / 1e6,
        "kernels": sum(row.count for row in rows if row.self_device_time_total),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("result", type=Path)
    parser.add_argument("kind", choices=("fitted", "held-out"))
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose name contains one of these")
    args = parser.parse_args()
    process_group.alone()
    found: dict[str, Any] = {}
    failed = []
    for case in FITTED if args.kind == "fitted" else HELD_OUT:
        if not any(part in str(case) for part in args.only):
            continue
        try:
            found[str(case)] = measure(case)
        except Exception:  # noqa: BLE001 - the other cases run all the same
            traceback.print_exc()
            failed.append(str(case))
        print(case, found.get(str(case)), f"{torch.cuda.memory_allocated() / 1e9:.1f} GB", flush=True)
        write_raw(args.result, stamp(f"1 x {torch.cuda.get_device_name()}"), cases=found, failed=failed)


if __name__ == "__main__":
    main()
