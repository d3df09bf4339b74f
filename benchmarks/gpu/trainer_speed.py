"""Speed of the trainer on GPUs; each figure is a ratio measured in one run.

    torchrun --nproc-per-node 4 benchmarks/gpu/trainer_speed.py update update.json
    torchrun --nproc-per-node 4 benchmarks/gpu/trainer_speed.py packing packing.json
    torchrun --nproc-per-node 1 benchmarks/gpu/trainer_speed.py rounding rounding.json

update: our actor update beside a bare Megatron-Core loop with the same model, layout and batch. Both use our
layer specification, so the ratio is the overhead of the runner.
packing: packed beside padded sequences on a long-tailed distribution of lengths. Padded rows all have the
length of the longest one, because micro-batches have one shape.
rounding: log-probabilities in bf16 beside those of transformers, both against fp32.
Needs megatron-core 0.16.1 and torch with CUDA on PYTHONPATH beside operator, worker_images and devcluster.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import process_group
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron_loop import train_step, trainable
from models import MODEL as WITH_MTP
from models import SEQUENCE, training_mfu_pct

from grpo_devcluster.results import stamp, write_raw
from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.api.v1alpha1.optimizer import OptimizerSpec
from grpo_worker.algorithms.losses import PolicyLossConfig, row_weights
from grpo_worker.common.ragged_batch import RaggedBatch
from grpo_worker.data.micro_batch import padded
from grpo_worker.megatron.conversion import hf_mapping
from grpo_worker.megatron.export.exporter import begin_export
from grpo_worker.megatron.families.registry import family_of
from grpo_worker.megatron.model.build import build_chunks, device, initialize_parallel
from grpo_worker.megatron.training.policy import PolicyModel
from grpo_worker.megatron.training.runner import MicroBatching
from grpo_worker.megatron.training.setup import ModelSetup
from grpo_worker.profiling.background import join

MODEL = WITH_MTP | {"num_nextn_predict_layers": 0}
ROWS = 8  # of one data-parallel rank
ROUNDS, WARM_UP = 5, 2


class DeviceWeights:
    """Seeded weights, drawn on the GPU: a CPU would take minutes."""

    def __init__(self, hf: dict[str, Any]) -> None:
        self._shapes = family_of(hf).shapes(hf)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str, dim: int, offset: int, length: int) -> torch.Tensor:
        shape = self._shapes[name]
        if name.endswith("norm.weight"):
            return torch.ones(length)
        if name.endswith("bias"):
            return torch.zeros(length)
        seed = sum(ord(c) * 31**i for i, c in enumerate(name)) % 2**31
        generator = torch.Generator(device()).manual_seed(seed)
        return (torch.randn(shape, device=device(), generator=generator) * 0.02).narrow(dim, offset, length)


def rows_of(lengths: list[int], seed: int, vocabulary: int = MODEL["vocab_size"]) -> RaggedBatch:
    """Return a batch of rows of these lengths, half prompt and half response."""
    generator = np.random.default_rng(seed)
    tokens = np.array(lengths, dtype=np.int32)
    prompts = tokens // 2
    answers = tokens - prompts
    log_probs = np.full(int(answers.sum()), -11.0, np.float32)
    return RaggedBatch(
        prompts,
        tokens,
        max(lengths),
        generator.integers(0, vocabulary, int(tokens.sum()), dtype=np.int32),
        {"old_log_probs": log_probs, "ref_log_prob": log_probs},
        {
            "advantages": generator.standard_normal(len(lengths), dtype=np.float32),
            "weights": row_weights(torch.from_numpy(answers), "token-mean", max(lengths)).numpy(),
        },
    )


def policy(layout: Layout, batching: MicroBatching, hf: dict[str, Any] = MODEL) -> PolicyModel:
    setup = ModelSetup(hf, layout, DeviceWeights(hf), batching, torch.bfloat16)
    return PolicyModel(setup, OptimizerSpec(lr=1e-6), 100, with_reference=False)


def bare_loop(layout: Layout, batch: RaggedBatch) -> Callable[[], None]:
    """Return a step of a language model with Megatron-Core's own calls, without our runner around it."""
    (model,) = build_chunks(MODEL, layout, torch.bfloat16)
    hf_mapping.load([model], family_of(MODEL), DeviceWeights(MODEL))
    ddp, optimizer = trainable(model, 1e-6)
    columns = padded(batch, range(batch.rows))
    ids, mask = columns["input_ids"].cuda(), columns["response_mask"].cuda()
    positions = torch.arange(ids.shape[1], device="cuda").expand_as(ids).contiguous()

    def forward(data: Iterator[int], stage: Any) -> tuple[torch.Tensor, Any]:
        row = next(data)
        part = slice(row, row + 1)
        losses = stage(ids[part], positions[part], None, labels=ids[part].roll(-1, 1))

        def loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
            return (output * mask[part]).sum() / mask[part].sum(), {}

        return losses, loss

    return partial(train_step, ddp, optimizer, forward, len(ids), ids.shape[1])


def timed(calls: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """Return the seconds of each call, in alternation, after a warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(WARM_UP + ROUNDS):
        for name, call in calls.items():
            dist.barrier()
            torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            torch.cuda.synchronize()
            if number >= WARM_UP:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def update() -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for sizes in ({"expert": 4}, {"tensor": 2, "expert": 2}):
        layout = Layout(world=dist.get_world_size(), **sizes)
        initialize_parallel(layout, 1)
        batch = rows_of([SEQUENCE] * ROWS, parallel_state.get_data_parallel_rank())
        ours = policy(layout, MicroBatching(1))
        step = bare_loop(layout, batch)
        found = timed({"ours": partial(ours.update, batch, PolicyLossConfig(), 0.001, 1.0), "bare": step})
        medians = {name: statistics.median(values) for name, values in found.items()}
        tokens = ROWS * SEQUENCE * layout.data / layout.world
        rows.append(
            {
                "layout": str(layout),
                "seconds": {name: [round(v, 4) for v in values] for name, values in found.items()},
                "tokens_per_second_per_gpu": {name: round(tokens / m, 1) for name, m in medians.items()},
                "mfu_pct": {name: round(_mfu(tokens / m), 2) for name, m in medians.items()},
                "ratio": round(medians["bare"] / medians["ours"], 4),
            }
        )
        del ours, step
        clean()
    return {"runner_overhead_ratio": min(row["ratio"] for row in rows), "rows": rows}


def _mfu(tokens_per_second: float) -> float:
    return training_mfu_pct(MODEL, SEQUENCE, tokens_per_second, torch.cuda.get_device_name())


def packing() -> dict[str, Any]:
    layout = Layout(world=dist.get_world_size(), expert=dist.get_world_size())
    initialize_parallel(layout, 1)
    generator = torch.Generator().manual_seed(3)
    draws = torch.randn(64 * layout.data, generator=generator) * 0.9 + 6.0
    lengths = [int(n) for n in draws.exp().clamp(64, SEQUENCE)]
    lengths[:: len(lengths) // layout.data] = [SEQUENCE] * layout.data  # each rank has a longest one
    rank = parallel_state.get_data_parallel_rank()
    mine = lengths[rank * 64 : (rank + 1) * 64]
    batch, loss = rows_of(mine, rank), PolicyLossConfig()
    models = {
        "padded": policy(layout, MicroBatching(2)),
        "packed": policy(layout, MicroBatching(max_tokens=2 * SEQUENCE)),
    }
    found = timed({name: partial(model.update, batch, loss, 0.001, 1.0) for name, model in models.items()})
    medians = {name: statistics.median(values) for name, values in found.items()}
    return {
        "packing_ratio": round(medians["padded"] / medians["packed"], 3),
        "mean_length": sum(lengths) / len(lengths),
        "longest": max(lengths),
        "layout": str(layout),
        "seconds": {name: [round(v, 4) for v in values] for name, values in found.items()},
    }


def rounding() -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    layout = Layout(world=1)
    initialize_parallel(layout, 1)
    hf = MODEL | {"num_hidden_layers": 4}
    ids = torch.randint(0, hf["vocab_size"], (4, 512), generator=torch.Generator().manual_seed(1))
    lengths = np.full(4, 512, np.int32)
    batch = RaggedBatch(lengths // 2, lengths, 512, ids.flatten().int().numpy())
    ours = policy(layout, MicroBatching(4), hf)
    found = {"ours_bf16": torch.from_numpy(ours.log_probs(batch, 1.0)["log_probs"]).reshape(4, 512)}
    with tempfile.TemporaryDirectory() as folder:
        join(begin_export(Path(folder) / "hf", hf, ours.chunks, family_of(hf), beside=False))
        for name, dtype in (("fp32", torch.float32), ("transformers_bf16", torch.bfloat16)):
            model = AutoModelForCausalLM.from_pretrained(Path(folder) / "hf", dtype=dtype).cuda().eval()
            with torch.no_grad():
                logits = model(ids.cuda()).logits.float()
            picked = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None].cuda())[..., 0]
            found[name] = torch.nn.functional.pad(picked, (1, 0)).cpu()
            del model, logits
            clean(groups=False)
    gaps = {name: (found[name] - found["fp32"]).abs() for name in ("ours_bf16", "transformers_bf16")}
    return {
        name: {"mean": float(gap.mean()), "max": float(gap.max()), "p99": float(gap.quantile(0.99))}
        for name, gap in gaps.items()
    }


def clean(groups: bool = True) -> None:
    import gc

    gc.collect()
    torch.cuda.empty_cache()
    if groups:
        parallel_state.destroy_model_parallel()


def main() -> None:
    cases = {"update": update, "packing": packing, "rounding": rounding}
    parser = argparse.ArgumentParser()
    parser.add_argument("case", choices=cases)
    parser.add_argument("result", type=Path)
    args = parser.parse_args()
    process_group.of_torchrun()
    result = cases[args.case]()
    if dist.get_rank() == 0:
        origin = stamp(f"{dist.get_world_size()} x {torch.cuda.get_device_name()}")
        write_raw(args.result, origin, cases={args.case: result})
        print(result)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
