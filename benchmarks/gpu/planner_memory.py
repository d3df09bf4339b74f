"""Memory that Megatron-Core allocates on GPUs, beside the planner's prediction.

    torchrun --nproc-per-node 4 benchmarks/gpu/planner_memory.py "TP1 PP1 CP1 EP4 DP4" memory-0.json
    torchrun --nproc-per-node 1 benchmarks/gpu/planner_memory.py "qwen3 2048" held-out-0.json

The names are those of FITTED_CASES and HELD_OUT_CASES in models.py. One case per launch, because
Megatron-Core does not destroy all of NCCL's communicators. Needs megatron-core 0.16.1 and torch with CUDA on
PYTHONPATH beside operator, worker_images and devcluster. Where Transformer Engine is importable,
Megatron-Core takes its fused Adam, elsewhere PyTorch's; the layers do not depend on it. Each case trains two
steps.
"""

import argparse
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import process_group
import torch
from megatron.core import optimizer, parallel_state
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron_loop import train_step, trainable
from models import FITTED_CASES, HELD_OUT_CASES, MICRO_BATCHES, MemoryCase

from grpo_devcluster.results import stamp, write_raw
from grpo_operator.api.v1alpha1.recompute import FULL, NOTHING, Recompute
from grpo_operator.plan.planner.model.shape import ModelShape
from grpo_operator.plan.planner.training.activations import Workload
from grpo_operator.plan.planner.training.memory import stage_memory
from grpo_operator.plan.planner.training.recompute import selective
from grpo_worker.megatron.model.build import build_chunks

CASES = FITTED_CASES | HELD_OUT_CASES
FUSED = not optimizer.USING_PYTORCH_OPTIMIZER


def measure(case: MemoryCase, recompute: Recompute) -> tuple[int, int]:
    """Return (bytes of weights, gradients and optimizer; peak bytes) of this rank."""
    layout = case.layout
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
    (gpt,) = build_chunks(case.hf, layout, torch.bfloat16, recompute)
    model, adam = trainable(gpt, 1e-5)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        _step(model, adam, case)
    state, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    del gpt, model, adam
    gc.collect()
    parallel_state.destroy_model_parallel()
    return state, peak


def _step(model: Any, adam: Any, case: MemoryCase) -> None:
    tokens = case.sequence // case.layout.context
    ids = torch.randint(0, case.hf["vocab_size"], (1, tokens), device="cuda")

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

    train_step(model, adam, forward, MICRO_BATCHES, case.sequence)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("case", choices=CASES)
    parser.add_argument("result", type=Path)
    args = parser.parse_args()
    process_group.of_torchrun()
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    case, rows = CASES[args.case], []
    if case.layout.world != world:
        raise SystemExit(f"{args.case!r} needs {case.layout.world} ranks: launch it with --nproc-per-node")
    for recompute in (FULL, selective(ModelShape.from_hf(case.hf), grouped=False), NOTHING):
        measured = torch.tensor(measure(case, recompute), device="cuda")
        every = [torch.empty_like(measured) for _ in range(world)]
        torch.distributed.all_gather(every, measured)
        rows += _compare(case, recompute, [(int(m[0]), int(m[1])) for m in every])
    if rank == 0:
        for row in rows:
            print(row, flush=True)
        name = args.case + (", fused Adam" if FUSED else "")
        write_raw(args.result, stamp(f"{world} x {torch.cuda.get_device_name()}"), cases={name: rows})
    torch.distributed.destroy_process_group()


def _compare(case: MemoryCase, recompute: Recompute, ranks: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """Return planned and measured bytes of each stage's fullest rank."""
    workload = Workload(case.sequence, 1, MICRO_BATCHES, recompute)
    size, rows = len(ranks) // case.layout.pipeline, []
    for stage in stage_memory(ModelShape.from_hf(case.hf), case.layout, workload, fused_optimizer=FUSED):
        mine = ranks[stage.stage * size : (stage.stage + 1) * size]
        state, peak = max(r[0] for r in mine), max(r[1] for r in mine)
        rows.append(
            {
                "layout": str(case.layout), "recompute": recompute.kind, "modules": list(recompute.modules),
                "stage": stage.stage,
                "state_planned": stage.state, "state_measured": state,
                "state_ratio": round(stage.state / state, 4),
                "peak_planned": stage.total, "peak_measured": peak,
                "peak_ratio": round(stage.total / peak, 4),
            }
        )  # fmt: skip
    return rows


if __name__ == "__main__":
    main()
