"""Transformer Engine's kernels beside Megatron-Core's own, on one GPU.

    torchrun --nproc-per-node 1 benchmarks/gpu/kernels.py kernels.json

fidelity: log-probabilities and gradients in bf16, both beside fp32 without Transformer Engine.
checkpoint: a checkpoint of each kind is loaded by the other; weights and optimizer must have the same bits.
packed: log-probabilities of packed beside padded sequences.
speed: the actor update of four layers with DeepSeek-V3's widths, whose eight experts get all tokens.
Needs transformer_engine and megatron-core on PYTHONPATH beside operator, worker_images and devcluster.
"""

import argparse
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from models import MODEL as WITH_MTP
from models import training_mfu_pct
from trainer_speed import DeviceWeights, clean, rows_of

from grpo_devcluster.results import stamp, write_raw
from grpo_operator.api.catalog.architectures import architecture
from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.api.v1alpha1.trainer import KernelChoice, OptimizerSpec
from grpo_worker.algorithms.losses import PolicyLossConfig
from grpo_worker.checkpointing.store import Origin, directory
from grpo_worker.megatron.checkpoint.checkpointer import Checkpointer
from grpo_worker.megatron.conversion import hf_mapping
from grpo_worker.megatron.families.registry import family_of
from grpo_worker.megatron.model.build import build_chunks, initialize_parallel
from grpo_worker.megatron.training.policy import PolicyModel
from grpo_worker.megatron.training.runner import MicroBatching
from grpo_worker.megatron.training.setup import ModelSetup

LOCAL, ENGINE = KernelChoice.LOCAL, KernelChoice.TRANSFORMER_ENGINE
SMALL: dict[str, Any] = WITH_MTP | {"num_nextn_predict_layers": 0, "num_hidden_layers": 3}
SLICE: dict[str, Any] = architecture("deepseek-v3") | {
    "num_hidden_layers": 4, "first_k_dense_replace": 0, "n_routed_experts": 8, "num_experts_per_tok": 8,
    "n_group": 1, "topk_group": 1, "vocab_size": 4096, "num_nextn_predict_layers": 0,
}  # fmt: skip
ONE = Layout(world=1)
ROUNDS, WARM_UP = 5, 2
MICRO_BATCHES = 8


def policy(
    hf: dict[str, Any],
    choice: KernelChoice,
    dtype: torch.dtype = torch.bfloat16,
    max_tokens: int | None = None,
) -> PolicyModel:
    batching = MicroBatching(max_tokens=max_tokens)
    setup = ModelSetup(hf, ONE, DeviceWeights(hf), batching, dtype, kernels=choice)
    return PolicyModel(setup, OptimizerSpec(lr=1e-5), 100, with_reference=False)


def fidelity() -> dict[str, Any]:
    """Return the distance of log-probabilities and gradients in bf16 from those in fp32."""
    batch = rows_of([512] * 4, 0)
    kinds = {"fp32": (LOCAL, torch.float32), "local": (LOCAL, torch.bfloat16),
             "transformer_engine": (ENGINE, torch.bfloat16)}  # fmt: skip
    log_probs, gradients = {}, {}
    for name, (choice, dtype) in kinds.items():
        model = policy(SMALL, choice, dtype)
        log_probs[name] = model.log_probs(batch, 1.0)["log_probs"]
        del model
        gradients[name] = _gradients(choice, dtype)
        clean(groups=False)
    found: dict[str, Any] = {}
    for name in ("local", "transformer_engine"):
        gap = np.abs(log_probs[name] - log_probs["fp32"])
        found[name] = {"logprob_mean": float(gap.mean()), "logprob_max": float(gap.max())}
        found[name] |= _distance(gradients[name], gradients["fp32"])
    return found


def _gradients(choice: KernelChoice, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return gradients by Hugging Face name, in host memory, fp32."""
    (model,) = build_chunks(SMALL, ONE, dtype, choice=choice)
    family = family_of(SMALL)
    hf_mapping.load([model], family, DeviceWeights(SMALL))
    ids = torch.randint(0, SMALL["vocab_size"], (1, 1024), generator=torch.Generator().manual_seed(2)).cuda()
    positions = torch.arange(ids.shape[1], device="cuda")[None]
    model(ids, positions, None, labels=ids.roll(-1, 1)).mean().backward()
    found = {}
    for name, parameter in model.named_parameters():
        names = hf_mapping.hf_names(model, family, name)
        grad = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        for hf_name, part in zip(names, grad.chunk(len(names)), strict=True):
            found[hf_name] = part.float().cpu()
    return found


def _distance(ours: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the relative distance of all gradients, and of the tensor that is farthest."""
    assert ours.keys() == wanted.keys(), "the kernels have other tensors"
    apart = {name: (float((ours[name] - wanted[name]).norm()), float(wanted[name].norm())) for name in wanted}
    whole = sum(a**2 for a, _ in apart.values()) ** 0.5 / sum(n**2 for _, n in apart.values()) ** 0.5
    return {"gradient": whole, "gradient_largest": max(a / n for a, n in apart.values() if n > 0)}


def checkpoint() -> dict[str, bool]:
    """Return whether weights and optimizer of each kind have the same bits in the other."""
    found = {}
    for first, second in ((LOCAL, ENGINE), (ENGINE, LOCAL)):
        with tempfile.TemporaryDirectory() as folder:
            saved = policy(SMALL, first)
            saved.update(rows_of([256] * 4, 1), PolicyLossConfig(), 0.001, 1.0)
            origin = Origin("model", str(ONE))
            writer = Checkpointer(folder, saved.parts(False), 1, origin)
            writer.save(1, {})
            writer.poll(blocking=True)
            loaded = policy(SMALL, second)
            Checkpointer(folder, loaded.parts(False), 1, origin).load(directory(Path(folder), 1))
            same = _bits(saved) == _bits(loaded)
            for model in (saved, loaded):
                model.update(rows_of([256] * 4, 2), PolicyLossConfig(), 0.001, 1.0)
            found[f"{first} to {second}"] = same
            found[f"{first} to {second}, the next step is near"] = _near(saved, loaded)
            del saved, loaded, writer
            clean(groups=False)
    return found


def _bits(model: PolicyModel) -> dict[str, bytes]:
    """Return the bits of the weights by Hugging Face name and offset."""
    found = {}
    for shard in model.held_shards():
        data = shard.tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
        found[f"{shard.name} {shard.offset}"] = data
    return found


def _near(first: PolicyModel, second: PolicyModel) -> bool:
    """Return whether two models have moved alike: an optimizer with another state would move far apart."""
    others = {(s.name, s.offset): s.tensor for s in second.held_shards()}
    apart = [(s.tensor.float() - others[s.name, s.offset].float()).abs().max() for s in first.held_shards()]
    return float(torch.stack(apart).max()) < 5e-4


def packed() -> dict[str, Any]:
    """Return the largest difference of log-probabilities between packed and padded sequences."""
    lengths = [100, 512, 37, 300, 411, 64]
    batch, found = rows_of(lengths, 3), {}
    for choice in (LOCAL, ENGINE):
        answers = [
            policy(SMALL, choice, max_tokens=most).log_probs(batch, 1.0)["log_probs"] for most in (None, 2048)
        ]
        gap = np.abs(answers[0] - answers[1])
        found[str(choice)] = {"mean": float(gap.mean()), "max": float(gap.max())}
        clean(groups=False)
    return found


def speed() -> dict[str, Any]:
    """Return the seconds of an update, and the speed-up, for two numbers of tokens of each expert."""
    found: dict[str, Any] = {str(tokens): {} for tokens in (4096, 256)}
    for choice in (LOCAL, ENGINE):
        model = policy(SLICE, choice)
        for tokens in (4096, 256):
            batch = rows_of([tokens] * MICRO_BATCHES, 4, SLICE["vocab_size"])
            seconds = _timed(partial(model.update, batch, PolicyLossConfig(), 0.001, 1.0))
            per_second = tokens * MICRO_BATCHES / statistics.median(seconds)
            mfu = training_mfu_pct(SLICE, tokens, per_second, torch.cuda.get_device_name())
            found[str(tokens)][str(choice)] = {
                "seconds": seconds, "tokens_per_second": per_second, "mfu_pct": mfu,
                "memory_gb": torch.cuda.max_memory_allocated() / 1e9,
            }  # fmt: skip
        del model
        clean(groups=False)
    for row in found.values():
        row["speedup"] = row[ENGINE]["tokens_per_second"] / row[LOCAL]["tokens_per_second"]
    return found


def _timed(call: Callable[[], Any]) -> list[float]:
    seconds = []
    for number in range(WARM_UP + ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        if number >= WARM_UP:
            seconds.append(time.perf_counter() - start)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("result", type=Path)
    args = parser.parse_args()
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    initialize_parallel(ONE, 1)
    origin, results, failed = stamp(f"1 x {torch.cuda.get_device_name()}"), {}, []
    for case in (fidelity, packed, checkpoint, speed):
        try:
            results[case.__name__] = case()
            print(case.__name__, results[case.__name__], flush=True)
        except Exception:  # noqa: BLE001 - the other cases run all the same
            failed.append(case.__name__)
            traceback.print_exc()
        clean(groups=False)
        write_raw(args.result, origin, cases=results, failed=failed)
    dist.destroy_process_group()
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
