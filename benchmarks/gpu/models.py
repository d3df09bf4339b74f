"""The models of the GPU benchmarks, and the utilisation of a GPU (pure)."""

from dataclasses import dataclass
from typing import Any

from grpo_operator.api.catalog.architectures import architecture
from grpo_operator.api.catalog.gpus import GPUS, GpuType
from grpo_operator.api.v1alpha1.layout import Layout
from grpo_worker.megatron.families.registry import family_of
from grpo_worker.metrics.flops import ModelFlops, attention_width

# DeepSeek-V3 with its real head sizes, small enough for one host.
MODEL: dict[str, Any] = architecture("deepseek-v3") | {
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
# The model of whole jobs.
JOB_MODEL: dict[str, Any] = architecture("deepseek-v3") | {
    "num_hidden_layers": 8,
    "first_k_dense_replace": 1,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "moe_intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 512,
    "n_routed_experts": 32,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 4,
    "vocab_size": 32768,
    "max_position_embeddings": 4096,
    "num_nextn_predict_layers": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
PROMPTS, RESPONSE, GROUP = 3, 2048, 16  # about as long to generate as to train on
JOB_TOKENS = 16384  # of a packed micro-batch
SEQUENCE = 4096
MICRO_BATCHES = 4  # of one step of planner_memory.py


@dataclass(frozen=True, slots=True)
class MemoryCase:
    """A model, row length and layout whose memory planner_memory.py measures."""

    hf: dict[str, Any]
    sequence: int
    layout: Layout


def _of_four_gpus(**sizes: int) -> tuple[str, MemoryCase]:
    layout = Layout(world=4, **sizes)
    return str(layout), MemoryCase(MODEL, SEQUENCE, layout)


# Layouts of four GPUs on which the planner's formulas were corrected.
FITTED_CASES: dict[str, MemoryCase] = dict(
    [
        _of_four_gpus(expert=4),
        _of_four_gpus(tensor=2, expert=2),
        _of_four_gpus(tensor=4, expert=4),
        _of_four_gpus(pipeline=2, expert=2),
        _of_four_gpus(tensor=2, pipeline=2, expert=2),
        _of_four_gpus(pipeline=4, layers_in_first_stage=1, layers_in_last_stage=1),
        _of_four_gpus(tensor=2, expert=1, expert_tensor=2),
        _of_four_gpus(context=2, expert=4),
    ]
)
QWEN3 = architecture("qwen3-8b") | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 20}
QWEN3_MOE = architecture("qwen3-30b-a3b") | {"num_hidden_layers": 4}
WIDE = architecture("deepseek-v3") | {
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "moe_intermediate_size": 1536,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "n_routed_experts": 32,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 4,
    "vocab_size": 65536,
    "num_nextn_predict_layers": 0,
}
# Models, row lengths and optimizers that no formula was fitted to. One GPU holds each of them.
HELD_OUT_CASES: dict[str, MemoryCase] = {
    f"{name} {sequence}": MemoryCase(hf, sequence, Layout(world=1))
    for name, hf in (("qwen3", QWEN3), ("qwen3-moe", QWEN3_MOE), ("deepseek-v3 wide", WIDE))
    for sequence in (2048, 8192)
}
ENGINE_MODELS: dict[str, dict[str, Any]] = {  # of engine_speed.py
    "qwen3-8b": architecture("qwen3-8b"),
    "deepseek-v3 narrow": MODEL | {"num_nextn_predict_layers": 0},
}
_PASSES = 3  # a forward pass, and a backward pass of twice the operations


def active_parameters(hf: dict[str, Any]) -> int:
    """Return how many parameters are multiplied with one token; the embedding is a lookup."""
    share = hf["num_experts_per_tok"] / hf["n_routed_experts"]
    count = 0.0
    for name, shape in family_of(hf).shapes(hf).items():
        if name.endswith("embed_tokens.weight"):
            continue
        size = 1
        for length in shape:
            size *= length
        count += size * (share if ".mlp.experts." in name else 1.0)
    return round(count)


def training_mfu_pct(hf: dict[str, Any], length: int, tokens_per_second: float, gpu: str) -> float:
    """Return the model FLOPs utilisation, in percent, of one GPU that trains on rows of ``length`` tokens.

    Raises KeyError for a GPU whose peak rate is not known.
    """
    flops = ModelFlops(active_parameters(hf), attention_width(hf)).forward([length]) * _PASSES / length
    return 100 * flops * tokens_per_second / peak_flops(gpu)


def peak_flops(gpu: str) -> float:
    """Return the dense bf16 FLOP/s of a GPU by the name that CUDA reports."""
    for kind in GpuType:
        if kind.value.split("-")[0].upper() in gpu:
            return GPUS[kind].flops
    raise KeyError(f"no peak rate of {gpu!r} is known: add it to grpo_operator.api.catalog.gpus")
