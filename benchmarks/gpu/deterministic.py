"""Updates with ``spec.trainer.deterministic`` and without: whether repeated ones are equal, and the price.

    python3 benchmarks/gpu/deterministic.py deterministic_plain.json --plain
    python3 benchmarks/gpu/deterministic.py deterministic.json
    torchrun --nproc-per-node 2 benchmarks/gpu/deterministic.py deterministic.json

The same updates of kernel_models.SLICE are taken twice from the same weights. Recorded: whether all weights
have the same bits afterwards, the largest difference of a weight relative to the largest one of its tensor,
and the seconds of an update. On several GPUs the ranks are data-parallel. A process measures one of the two
ways, because NCCL reads its variables once.
Needs transformer_engine and megatron-core on PYTHONPATH beside operator, worker_images and devcluster.
"""

import argparse
import os
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import process_group
import torch
import torch.distributed as dist
from kernel_models import BF16, ENGINE, FP8, LOCAL, SLICE, Kind, discard, free, seconds, setup
from trainer_speed import rows_of

from grpo_devcluster.results import stamp, write_raw
from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.api.v1alpha1.optimizer import OptimizerSpec
from grpo_worker.algorithms.losses import PolicyLossConfig
from grpo_worker.megatron.deterministic import require_deterministic
from grpo_worker.megatron.model.build import initialize_parallel
from grpo_worker.megatron.training.policy import PolicyModel

UPDATES = 4


@dataclass(frozen=True)
class Case:
    """Kernels and rows of an update. ``packed``: tokens of a micro-batch; None: one row each."""

    kind: Kind
    lengths: tuple[int, ...] = (2048,) * 4
    packed: int | None = None


CASES = {
    "transformer_engine": Case((ENGINE, BF16)),
    # As in jobs of short answers: hundreds of sequences in a micro-batch.
    "transformer_engine packed": Case((ENGINE, BF16), tuple(range(16, 48)) * 16, packed=8192),
    "fp8": Case((ENGINE, FP8)),
    "local": Case((LOCAL, BF16)),
}
Weights = list[torch.Tensor]


def updated(case: Case, layout: Layout, deterministic: bool) -> tuple[Weights, float]:
    """Return this rank's weights after the updates, and the median seconds of one after the first."""
    free()
    made = replace(
        setup(SLICE, case.kind, max_tokens=case.packed, layout=layout), deterministic=deterministic
    )
    model = PolicyModel(made, OptimizerSpec(lr=1e-4), 100, with_reference=False)
    rows = rows_of(list(case.lengths), 3 + dist.get_rank(), SLICE["vocab_size"])
    taken = [seconds(lambda: model.update(rows, PolicyLossConfig(), 0.001, 1.0)) for _ in range(UPDATES)]
    with model.trainable.weights.on_device():
        weights = [shard.tensor.detach().cpu() for shard in model.held_shards()]
    discard(model)
    return weights, statistics.median(taken[1:])


def repeated(case: Case, layout: Layout, deterministic: bool) -> dict[str, Any]:
    """Return how far the weights of two runs are apart, and the seconds of an update."""
    first, _ = updated(case, layout, deterministic)
    second, taken = updated(case, layout, deterministic)
    same = all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    far = max(_distance(one, other) for one, other in zip(first, second, strict=True))
    return {"same_bits": same, "difference": far, "seconds": taken}


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.float() - other.float()).abs().max() / one.float().abs().max().clamp(min=1e-30))


def main() -> None:
    """Measure all kinds of kernels in one of the two ways."""
    parser = argparse.ArgumentParser()
    parser.add_argument("result", type=Path)
    parser.add_argument("--plain", action="store_true")
    args = parser.parse_args()
    if not args.plain:
        require_deterministic()
    if "LOCAL_RANK" in os.environ:
        process_group.of_torchrun()
        initialize_parallel(Layout(world=dist.get_world_size()), 1)
    else:
        process_group.alone()
    layout = Layout(world=dist.get_world_size())
    way = "plain" if args.plain else "deterministic"
    cases: dict[str, Any] = {}
    for name, case in CASES.items():
        cases[f"{way}: {name} on {layout.world}"] = repeated(case, layout, not args.plain)
        if dist.get_rank() == 0:
            print(way, name, list(cases.values())[-1], flush=True)
            write_raw(args.result, stamp(f"{layout.world} x {torch.cuda.get_device_name()}"), cases=cases)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
