"""Cases of kernels.py about speed: the update of four layers with DeepSeek-V3's widths."""

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from kernel_models import BF16, ENGINE, FP8, LOCAL, ONE, SLICE, policy, seconds
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron_loop import train_step, trainable
from models import training_mfu_pct
from trainer_speed import rows_of

from grpo_worker.algorithms.losses import PolicyLossConfig
from grpo_worker.megatron.model.hf_config import mcore_config

TOKENS = (4096, 256)  # of a micro-batch; each expert gets all of them
MICRO_BATCHES = 8
ROUNDS, WARM_UP = 5, 2
# What Megatron-Core's own users turn on for a mixture of experts with Transformer Engine.
FUSIONS: dict[str, Any] = {
    "moe_grouped_gemm": True, "moe_permute_fusion": True, "moe_router_fusion": True,
    "apply_rope_fusion": True, "bias_activation_fusion": True, "bias_dropout_fusion": True,
    "cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te",  # codespell:ignore te
}  # fmt: skip


def speed(kind: str) -> dict[str, Any]:
    """Return seconds, tokens per second and MFU of an update by the number of tokens of each expert."""
    step = bare_loop() if kind == "megatron" else _ours(kind)
    found: dict[str, Any] = {}
    for tokens in TOKENS:
        torch.cuda.reset_peak_memory_stats()
        taken = timed(partial(step, tokens))
        per_second = tokens * MICRO_BATCHES / statistics.median(taken)
        found[str(tokens)] = {
            "seconds": taken, "tokens_per_second": per_second,
            "mfu_pct": training_mfu_pct(SLICE, tokens, per_second, torch.cuda.get_device_name()),
            "memory_gb": torch.cuda.max_memory_allocated() / 1e9,
        }  # fmt: skip
    return found


def _ours(kind: str) -> Callable[[int], Any]:
    kinds = {"local": (LOCAL, BF16), "transformer_engine": (ENGINE, BF16), "fp8": (ENGINE, FP8)}
    model = policy(SLICE, kinds[kind])

    def step(tokens: int) -> None:
        batch = rows_of([tokens] * MICRO_BATCHES, 4, SLICE["vocab_size"])
        model.update(batch, PolicyLossConfig(), 0.001, 1.0)

    return step


def bare_loop() -> Callable[[int], Any]:
    """Return a step of a language model with Megatron-Core's own layers and calls."""
    config = mcore_config(SLICE, ONE, torch.bfloat16, **FUSIONS)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True)
    model = GPTModel(
        config, spec, SLICE["vocab_size"], 8192, position_embedding_type="rope",
        rotary_base=SLICE["rope_theta"],
    ).cuda()  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02)
    ddp, optimizer = trainable(model, 1e-5)
    ids = torch.randint(0, SLICE["vocab_size"], (MICRO_BATCHES, max(TOKENS)), device="cuda")

    def forward(data: Iterator[int], stage: Any) -> tuple[torch.Tensor, Any]:
        row = next(data)
        part = ids[row : row + 1, : forward.tokens]  # type: ignore[attr-defined]
        positions = torch.arange(part.shape[1], device="cuda")[None]
        losses = stage(part, positions, None, labels=part.roll(-1, 1))
        return losses, lambda output: (output.mean(), {})

    def step(tokens: int) -> None:
        forward.tokens = tokens  # type: ignore[attr-defined]
        train_step(ddp, optimizer, forward, MICRO_BATCHES, tokens)

    return step


def timed(call: Callable[[], Any]) -> list[float]:
    return [seconds(call) for _ in range(WARM_UP + ROUNDS)][WARM_UP:]


def ratios(found: dict[str, Any]) -> dict[str, float]:
    """Return the ratios that the speeds of all kinds give."""

    def rate(kind: str, tokens: int) -> float:
        return float(found[kind][str(tokens)]["tokens_per_second"])

    many, few = TOKENS
    return {
        "update_ratio_vs_megatron_te": rate("transformer_engine", many) / rate("megatron", many),
        "speedup_over_local_4096": rate("transformer_engine", many) / rate("local", many),
        "speedup_over_local_256": rate("transformer_engine", few) / rate("local", few),
        "fp8_speedup": rate("fp8", many) / rate("transformer_engine", many),
        "mfu_slice_bf16": found["transformer_engine"][str(many)]["mfu_pct"] / 100,
        "mfu_slice_fp8": found["fp8"][str(many)]["mfu_pct"] / 100,
    }


def profile(kind: str = "transformer_engine") -> dict[str, Any]:
    """Return the launches and the host's time of an update with few tokens."""
    step = _ours(kind)
    for _ in range(3):
        step(min(TOKENS))
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    ) as trace:
        step(min(TOKENS))
        torch.cuda.synchronize()
    rows = sorted(trace.key_averages(), key=lambda row: -row.self_device_time_total)
    print(trace.key_averages().table(sort_by="self_cpu_time_total", row_limit=40, max_name_column_width=60))
    launches = sum(row.count for row in rows if "LaunchKernel" in row.key)
    return {
        "launches": launches,
        "gpu_ms": sum(row.self_device_time_total for row in rows) / 1e3,
        "largest": {row.key[:80]: [row.count, row.self_device_time_total / 1e3] for row in rows[:25]},
    }
