"""Context parallelism on two GPUs: what it computes, and packed beside padded sequences.

    torchrun --nproc-per-node 2 benchmarks/gpu/context_speed.py context.json

Each kind of kernels computes the same batch in two layouts, data parallelism and context parallelism: the
log-probabilities and the norm of the gradient must be as near as rounding allows. Then it updates on a
long-tailed distribution of lengths, whose longest row a padded micro-batch is as wide as, and on rows of
128 k tokens; and two data-parallel ranks save a checkpoint together.
Needs transformer_engine and megatron-core on PYTHONPATH beside operator, worker_images and devcluster.
"""

import argparse
import statistics
import tempfile
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import process_group
import torch
import torch.distributed as dist
from kernel_models import BF16, ENGINE, FP8, LOCAL, SLICE, SMALL, Kind, discard, policy, seconds
from megatron.core import parallel_state
from rank_checkpoint import digest, state
from trainer_speed import rows_of

from grpo_devcluster.results import stamp, write_raw
from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.api.v1alpha1.recompute import FULL
from grpo_operator.plan.planner.model.shape import ModelShape
from grpo_operator.plan.planner.training.activations import Workload
from grpo_operator.plan.planner.training.memory import stage_memory
from grpo_worker.algorithms.losses import PolicyLossConfig
from grpo_worker.checkpointing.store import Origin, directory
from grpo_worker.common.ragged_batch import RaggedBatch, joined
from grpo_worker.megatron.checkpoint.checkpointer import Checkpointer
from grpo_worker.megatron.model.build import initialize_parallel

KINDS: dict[str, Kind] = {
    "local": (LOCAL, BF16), "transformer_engine": (ENGINE, BF16), "fp8": (ENGINE, FP8),
}  # fmt: skip
HF = SMALL | {"max_position_embeddings": 32768}
# As many rows reach the experts as with 16 k tokens on each rank and DeepSeek-V3's eight experts of a token.
LONG = SLICE | {"num_hidden_layers": 2, "num_experts_per_tok": 2, "max_position_embeddings": 131072}
LONG_TOKENS = 131072
LONGEST, ROWS, ROUNDS = 16384, 32, 3
BY_DATA, BY_CONTEXT = Layout(world=2), Layout(world=2, context=2)


def computed(kind: Kind, layout: Layout, lengths: list[int]) -> tuple[np.ndarray, float]:
    """Return all log-probabilities of the rows, and the norm of an update's gradient."""
    initialize_parallel(layout, 1)
    model = policy(HF, kind, max_tokens=8192, layout=layout)
    middle = len(lengths) // 2
    halves = [rows_of(lengths[:middle], 7), rows_of(lengths[middle:], 8)]
    whole = joined(halves)
    own = halves[dist.get_rank()] if layout is BY_DATA else whole
    log_probs = torch.zeros(2, int(whole.lengths.sum()), device="cuda")
    values = torch.from_numpy(model.log_probs(own, 1.0)["log_probs"]).cuda()
    place = dist.get_rank() * (log_probs.shape[1] - len(values)) if layout is BY_DATA else 0
    log_probs[0, place : place + len(values)] = values
    dist.all_reduce(log_probs)  # each token's value is on one rank
    norm = model.update(own, PolicyLossConfig(), 0.001, 1.0)["actor/grad_norm"]
    discard(model)
    parallel_state.destroy_model_parallel()
    return log_probs[0].cpu().numpy(), norm


def fidelity(kind: Kind) -> dict[str, float]:
    lengths = [3000, 512, 77, 1000, 411, 2048, 64, 900]
    (data, data_norm), (context, norm) = (computed(kind, layout, lengths) for layout in (BY_DATA, BY_CONTEXT))
    gap = np.abs(data - context)
    return {"mean": float(gap.mean()), "max": float(gap.max()), "grad_norm": norm / data_norm}


def packing(kind: Kind) -> dict[str, Any]:
    """Return the seconds of an update with packed and with padded rows, and the distribution of the rows."""
    draws = torch.randn(ROWS, generator=torch.Generator().manual_seed(3)) * 0.9 + 7.0
    lengths = [int(n) for n in draws.exp().clamp(128, LONGEST)]
    lengths[0] = LONGEST
    batch = rows_of(lengths, 5)
    initialize_parallel(BY_CONTEXT, 1)
    found: dict[str, Any] = {"mean_length": sum(lengths) / ROWS, "longest": LONGEST, "rows": ROWS}
    for name, most in (("packed", LONGEST // 2), ("padded", None)):
        model = policy(HF, kind, max_tokens=most, layout=BY_CONTEXT)
        found[name] = [_seconds(model, batch) for _ in range(ROUNDS + 1)][1:]
        discard(model)
    parallel_state.destroy_model_parallel()
    return found | {"ratio": statistics.median(found["padded"]) / statistics.median(found["packed"])}


def long(kind: Kind) -> dict[str, Any]:
    """Return the seconds and the memory of an update with two rows of 128 k tokens, beside the plan."""
    initialize_parallel(BY_CONTEXT, 1)
    model = policy(LONG, kind, max_tokens=LONG_TOKENS // 2, layout=BY_CONTEXT, recompute=FULL)
    batch = rows_of([LONG_TOKENS] * 2, 6, LONG["vocab_size"])
    _seconds(model, batch)
    torch.cuda.reset_peak_memory_stats()
    taken = _seconds(model, batch)
    workload = Workload(LONG_TOKENS, 1, 2, fused=kind[0] is ENGINE)
    (stage,) = stage_memory(ModelShape.from_hf(LONG), BY_CONTEXT, workload)
    peak = torch.cuda.max_memory_allocated()
    discard(model)
    parallel_state.destroy_model_parallel()
    return {
        "tokens": LONG_TOKENS,
        "seconds": taken,
        "peak_gb": peak / 1e9,
        "planned_ratio": stage.total / peak,
    }


def saving(kind: Kind) -> dict[str, Any]:
    """Return whether a checkpoint that two data-parallel ranks share has the same bits when it is loaded."""
    initialize_parallel(BY_DATA, 1)
    model = policy(HF, kind, layout=BY_DATA)
    own = rows_of([512, 300], 7 + dist.get_rank())
    model.update(own, PolicyLossConfig(), 0.001, 1.0)
    with tempfile.TemporaryDirectory() as folder:
        names = [folder]
        dist.broadcast_object_list(names)
        checkpoints = Checkpointer(names[0], model.parts(False), 1, Origin("model", str(BY_DATA)))
        before, stalls = digest(model), []
        for step in (1, 2, 3):
            stalls.append(seconds(lambda step=step: checkpoints.save(step, {})))  # type: ignore[misc]
            checkpoints.poll(blocking=True)
        for tensor in state(model):
            tensor.zero_()
        checkpoints.load(directory(Path(names[0]), 3))
        dist.barrier()
    same = torch.tensor(int(digest(model) == before), device="cuda")
    dist.all_reduce(same, dist.ReduceOp.MIN)
    discard(model)
    parallel_state.destroy_model_parallel()
    return {"same_bits": bool(same), "stall_seconds": stalls}


def _seconds(model: Any, batch: RaggedBatch) -> float:
    dist.barrier()
    return seconds(lambda: model.update(batch, PolicyLossConfig(), 0.001, 1.0))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("result", type=Path)
    args = parser.parse_args()
    process_group.of_torchrun()
    found: dict[str, Any] = {}
    failed = []
    for case in (fidelity, packing, long, saving):
        for name, kind in KINDS.items():
            if case in (long, saving) and name != "transformer_engine":
                continue  # nothing else differs
            try:
                found[f"{case.__name__} {name}"] = case(kind)
            except Exception:  # noqa: BLE001 - both ranks fail alike, and the other cases run all the same
                traceback.print_exc()
                failed.append(f"{case.__name__} {name}")
                if parallel_state.is_initialized():
                    parallel_state.destroy_model_parallel()
            if dist.get_rank() == 0:
                print(case.__name__, name, found.get(f"{case.__name__} {name}"), flush=True)
                origin = stamp(f"2 x {torch.cuda.get_device_name()}")
                write_raw(args.result, origin, cases=found, failed=failed)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
