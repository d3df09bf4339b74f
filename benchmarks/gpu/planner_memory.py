"""What Megatron-Core really allocates on GPUs, beside what the planner predicts.

    for i in 0 1 2 3 4 5 6 7; do
        torchrun --nproc-per-node 4 benchmarks/gpu/planner_memory.py $i RESULT-$i.json
    done

One layout a launch, because Megatron-Core leaves NCCL's communicators behind.
Needs megatron-core 0.16.1 and torch with CUDA on PYTHONPATH beside this repository's sources.
A DeepSeek-V3-shaped model with the real head sizes trains two steps in each layout.
"""

import gc
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from grpo_operator.api.catalog.architectures import architecture
from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.plan.planner.model.shape import ModelShape
from grpo_operator.plan.planner.training.activations import Workload
from grpo_operator.plan.planner.training.memory import stage_memory
from grpo_worker.megatron.model.build import build_chunks

MODEL = architecture("deepseek-v3") | {
    "num_hidden_layers": 8,
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "moe_intermediate_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 768,
    "n_routed_experts": 32,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 4,
    "vocab_size": 65536,
    "max_position_embeddings": 8192,
}
SEQUENCE, MICRO_BATCHES = 4096, 4
LAYOUTS: list[dict[str, int]] = [
    {"expert": 4},
    {"tensor": 2, "expert": 2},
    {"tensor": 4, "expert": 4},
    {"pipeline": 2, "expert": 2},
    {"tensor": 2, "pipeline": 2, "expert": 2},
    {"pipeline": 4, "layers_in_first_stage": 1, "layers_in_last_stage": 1},
    {"tensor": 2, "expert": 1, "expert_tensor": 2},
    {"context": 2, "expert": 4},
]


def measure(layout: Layout, recompute: bool) -> tuple[int, int]:
    """(bytes of weights, gradients and optimizer; peak bytes) on this rank."""
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
    model, optimizer = _build(layout, recompute)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        _step(model, optimizer, layout)
    state, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    del model, optimizer
    gc.collect()
    parallel_state.destroy_model_parallel()
    return state, peak


def _build(layout: Layout, recompute: bool) -> tuple[Any, Any]:
    (gpt,) = build_chunks(MODEL, layout, torch.bfloat16, recompute)
    config = gpt.config
    options = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    model = DistributedDataParallel(config, options, gpt)
    settings = OptimizerConfig(
        optimizer="adam", lr=1e-5, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True
    )
    optimizer = get_megatron_optimizer(settings, [model])
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    return model, optimizer


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

    model.zero_grad_buffer()
    optimizer.zero_grad()
    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter(range(MICRO_BATCHES)),
        model=model,
        num_microbatches=MICRO_BATCHES,
        seq_length=SEQUENCE,
        micro_batch_size=1,
        forward_only=False,
    )
    optimizer.step()


def main() -> None:
    torch.distributed.init_process_group("nccl")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    layout, rows = Layout(world=world, **LAYOUTS[int(sys.argv[1])]), []
    for recompute in (True, False):
        measured = torch.tensor(measure(layout, recompute), device="cuda")
        every = [torch.empty_like(measured) for _ in range(world)]
        torch.distributed.all_gather(every, measured)
        rows += _compare(layout, recompute, [(int(m[0]), int(m[1])) for m in every])
    if rank == 0:
        for row in rows:
            print(row, flush=True)
        Path(sys.argv[2]).write_text(json.dumps(rows, indent=1))
    torch.distributed.destroy_process_group()


def _compare(layout: Layout, recompute: bool, ranks: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """Planned beside measured bytes of each stage's fullest rank."""
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
