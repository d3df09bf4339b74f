"""Memory that Megatron-Core allocates on GPUs, beside the planner's prediction.

    for i in 0 1 2 3 4 5 6 7; do
        torchrun --nproc-per-node 4 benchmarks/gpu/planner_memory.py $i memory-$i.json
    done

One layout per launch, because Megatron-Core does not destroy all of NCCL's communicators.
Needs megatron-core 0.16.1 and torch with CUDA on PYTHONPATH beside operator, worker_images and devcluster.
A DeepSeek-V3-shaped model with the real head sizes trains two steps in each layout.
"""

import argparse
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron_loop import train_step, trainable
from models import MEASURED_LAYOUTS, MICRO_BATCHES, MODEL, SEQUENCE

from grpo_devcluster.results import stamp, write_raw
from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.plan.planner.model.shape import ModelShape
from grpo_operator.plan.planner.training.activations import Workload
from grpo_operator.plan.planner.training.memory import stage_memory
from grpo_worker.megatron.model.build import build_chunks


def measure(layout: Layout, recompute: bool) -> tuple[int, int]:
    """Return (bytes of weights, gradients and optimizer; peak bytes) of this rank."""
    parallel_state.initialize_model_parallel(
        layout.tensor,
        layout.pipeline,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
    )
    model_parallel_cuda_manual_seed(1)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    (gpt,) = build_chunks(MODEL, layout, torch.bfloat16, recompute)
    model, optimizer = trainable(gpt, 1e-5)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        _step(model, optimizer, layout)
    state, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    del gpt, model, optimizer
    gc.collect()
    parallel_state.destroy_model_parallel()
    return state, peak


def _step(model: Any, optimizer: Any, layout: Layout) -> None:
    tokens = SEQUENCE // layout.context
    ids = torch.randint(0, MODEL["vocab_size"], (1, tokens), device="cuda")

    def forward(data: Iterator[int], stage: Any) -> tuple[torch.Tensor, Any]:
        next(data)
        positions = torch.arange(tokens, device="cuda")[None]
        output = stage(ids, positions, None)
        if not parallel_state.is_pipeline_last_stage():
            return output, None

        def loss(logits: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
            wide = logits.transpose(0, 1).float().contiguous()
            return vocab_parallel_cross_entropy(wide, ids.transpose(0, 1).contiguous()).mean(), {}

        return output, loss

    train_step(model, optimizer, forward, MICRO_BATCHES, SEQUENCE)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "layout", type=int, choices=range(len(MEASURED_LAYOUTS)), help="index into MEASURED_LAYOUTS"
    )
    parser.add_argument("result", type=Path)
    args = parser.parse_args()
    torch.distributed.init_process_group("nccl")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    layout, rows = Layout(world=world, **MEASURED_LAYOUTS[args.layout]), []
    for recompute in (True, False):
        measured = torch.tensor(measure(layout, recompute), device="cuda")
        every = [torch.empty_like(measured) for _ in range(world)]
        torch.distributed.all_gather(every, measured)
        rows += _compare(layout, recompute, [(int(m[0]), int(m[1])) for m in every])
    if rank == 0:
        for row in rows:
            print(row, flush=True)
        write_raw(args.result, stamp(f"{world} x {torch.cuda.get_device_name()}"), cases={str(layout): rows})
    torch.distributed.destroy_process_group()


def _compare(layout: Layout, recompute: bool, ranks: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """Return planned and measured bytes of each stage's fullest rank."""
    workload = Workload(SEQUENCE, 1, MICRO_BATCHES, recompute)
    size, rows = len(ranks) // layout.pipeline, []
    for stage in stage_memory(ModelShape.from_hf(MODEL), layout, workload, fused_optimizer=False):
        mine = ranks[stage.stage * size : (stage.stage + 1) * size]
        state, peak = max(r[0] for r in mine), max(r[1] for r in mine)
        rows.append(
            {
                "layout": str(layout), "recompute": recompute, "stage": stage.stage,
                "state_planned": stage.state, "state_measured": state,
                "state_ratio": round(stage.state / state, 4),
                "peak_planned": stage.total, "peak_measured": peak,
                "peak_ratio": round(stage.total / peak, 4),
            }
        )  # fmt: skip
    return rows


if __name__ == "__main__":
    main()
