"""Models, sizes and kernels whose updates planner_updates.py measures (pure)."""

from dataclasses import dataclass
from typing import Any

from models import MODEL, QWEN3, QWEN3_MOE, WIDE

from grpo_operator.api.catalog.architectures import architecture
from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.api.v1alpha1.recompute import FULL, NOTHING, Recompute
from grpo_operator.api.v1alpha1.trainer import KernelChoice, Precision
from grpo_operator.plan.planner.model.shape import ModelShape
from grpo_operator.plan.planner.training.recompute import selective

LOCAL, ENGINE = KernelChoice.LOCAL, KernelChoice.TRANSFORMER_ENGINE
BF16, FP8 = Precision.BF16, Precision.FP8_BLOCK128
MICRO_BATCHES = 4
ONE = Layout(world=1)
# Layers of DeepSeek-V3; eight experts get all tokens, as those of one of 32 expert-parallel ranks do.
_SLICE: dict[str, Any] = architecture("deepseek-v3") | {
    "num_hidden_layers": 3, "first_k_dense_replace": 0, "n_routed_experts": 8, "num_experts_per_tok": 8,
    "n_group": 1, "topk_group": 1, "vocab_size": 4096, "num_nextn_predict_layers": 0,
}  # fmt: skip
_QWEN3_8B = architecture("qwen3-8b") | {"num_hidden_layers": 8}
_FEW = WIDE | {
    "hidden_size": 5120, "moe_intermediate_size": 2048, "n_routed_experts": 16, "n_group": 1, "topk_group": 1,
}  # fmt: skip
_MANY = _SLICE | {
    "num_hidden_layers": 4, "hidden_size": 3072, "moe_intermediate_size": 768, "n_routed_experts": 64,
    "num_attention_heads": 48, "num_key_value_heads": 48,
}  # fmt: skip
_NARROW = MODEL | {"num_nextn_predict_layers": 0}
_EXPERTS = {
    "num_hidden_layers": 3,
    "n_routed_experts": 12,
    "vocab_size": 32768,
    "num_nextn_predict_layers": 0,
}
_PUBLISHED: dict[str, dict[str, Any]] = {
    "kimi-k2": architecture("kimi-k2") | _EXPERTS,
    "qwen3-235b": architecture("qwen3-235b-a22b") | {"num_hidden_layers": 4, "num_experts": 16},
    "glm-4.5-air": architecture("glm-4.5-air") | _EXPERTS | {"num_hidden_layers": 5, "n_routed_experts": 16},
    "llama-3.1-8b": architecture("llama-3.1-8b") | {"num_hidden_layers": 8},
    "deepseek-v3": architecture("deepseek-v3")
    | _EXPERTS
    | {"first_k_dense_replace": 1, "n_routed_experts": 16, "n_group": 1, "topk_group": 1},
    "glm-4.7": architecture("glm-4.7")
    | _EXPERTS
    | {"num_hidden_layers": 4, "first_k_dense_replace": 1, "n_routed_experts": 16},
    "qwen2.5-7b": architecture("qwen2.5-7b") | {"num_hidden_layers": 8},
}
# As many experts as ranks share them; each rank has eight, and each expert gets as many tokens as a rank.
_SHARED = {
    f"slice of {ranks}": _SLICE | {"num_hidden_layers": 4, "n_routed_experts": 8 * ranks} for ranks in (2, 4)
}
MODELS: dict[str, dict[str, Any]] = _PUBLISHED | _SHARED | {
    "slice": _SLICE, "narrow": _NARROW, "qwen3": QWEN3, "qwen3-moe": QWEN3_MOE, "wide": WIDE,
    "qwen3-8b": _QWEN3_8B, "few experts": _FEW, "many experts": _MANY,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class UpdateCase:
    """An update of four padded rows, one in each micro-batch. ``tokens``: of a row.

    ``recompute``: none, selective or full, as a job asks for it.
    """

    model: str
    tokens: int
    kernels: KernelChoice = ENGINE
    precision: Precision = BF16
    recompute: str = "none"
    layout: Layout = ONE

    @property
    def hf(self) -> dict[str, Any]:
        return MODELS[self.model]

    @property
    def recomputed(self) -> Recompute:
        if self.recompute == "selective":
            return selective(ModelShape.from_hf(self.hf), self.kernels is ENGINE)
        return FULL if self.recompute == "full" else NOTHING

    def __str__(self) -> str:
        kernels = "TE" if self.kernels is ENGINE else "local"  # codespell:ignore te
        precision = " fp8" if self.precision is FP8 else ""
        world = "" if self.layout.world == 1 else f", {self.layout}"
        return f"{self.model} {self.tokens} {kernels}{precision} {self.recompute}{world}"


# The formulas for Transformer Engine were corrected on these, and the efficiencies fitted.
FITTED = (
    UpdateCase("slice", 4096),
    UpdateCase("slice", 512),
    UpdateCase("slice", 4096, recompute="full"),
    UpdateCase("slice", 4096, recompute="selective"),
    UpdateCase("slice", 4096, precision=FP8),
    UpdateCase("slice", 512, precision=FP8),
    UpdateCase("narrow", 4096),
    UpdateCase("narrow", 4096, precision=FP8),
    UpdateCase("narrow", 1024),
    UpdateCase("qwen3", 4096),
    UpdateCase("qwen3", 4096, precision=FP8),
    UpdateCase("qwen3", 1024, recompute="selective"),
    UpdateCase("slice", 8192, recompute="selective"),
    UpdateCase("slice", 2048, precision=FP8, recompute="full"),
    UpdateCase("narrow", 8192, recompute="full"),
    UpdateCase("narrow", 4096, precision=FP8, recompute="selective"),
    UpdateCase("qwen3", 8192, recompute="full"),
    UpdateCase("qwen3", 2048, precision=FP8, recompute="selective"),
    UpdateCase("qwen3-moe", 4096),
    UpdateCase("qwen3-moe", 8192, recompute="full"),
    UpdateCase("qwen3-moe", 4096, precision=FP8),
    UpdateCase("wide", 4096),
    UpdateCase("wide", 8192, recompute="selective"),
    UpdateCase("wide", 4096, precision=FP8, recompute="full"),
    UpdateCase("qwen3-8b", 2048),
    UpdateCase("qwen3-8b", 4096, recompute="full"),
    UpdateCase("qwen3-8b", 4096, precision=FP8),
    UpdateCase("qwen3-8b", 8192, recompute="selective"),
    UpdateCase("few experts", 4096),
    UpdateCase("few experts", 2048, precision=FP8, recompute="full"),
    UpdateCase("few experts", 8192, recompute="selective"),
    UpdateCase("few experts", 4096, recompute="full"),
    UpdateCase("many experts", 4096),
    UpdateCase("many experts", 1024, recompute="selective"),
    UpdateCase("many experts", 4096, precision=FP8, recompute="selective"),
    UpdateCase("many experts", 8192, recompute="full"),
    UpdateCase("kimi-k2", 4096),
    UpdateCase("kimi-k2", 4096, precision=FP8, recompute="full"),
    UpdateCase("kimi-k2", 8192, recompute="selective"),
    UpdateCase("qwen3-235b", 4096),
    UpdateCase("qwen3-235b", 8192, recompute="full"),
    UpdateCase("qwen3-235b", 8192, precision=FP8, recompute="selective"),
    UpdateCase("glm-4.5-air", 4096),
    UpdateCase("glm-4.5-air", 8192, recompute="selective"),
    UpdateCase("glm-4.5-air", 8192, precision=FP8),
    UpdateCase("llama-3.1-8b", 4096),
    UpdateCase("llama-3.1-8b", 8192, recompute="full"),
    UpdateCase("deepseek-v3", 4096),
    UpdateCase("deepseek-v3", 8192, precision=FP8, recompute="full"),
    UpdateCase("slice", 2048, LOCAL),
    UpdateCase("narrow", 4096, LOCAL, recompute="full"),
    UpdateCase("qwen3-8b", 2048, LOCAL),
    UpdateCase("many experts", 1024, LOCAL),
    UpdateCase("wide", 4096, LOCAL),
    UpdateCase("qwen3-moe", 2048, LOCAL, recompute="full"),
)
# Nothing was fitted to these: models or row lengths that are not above.
HELD_OUT = (
    UpdateCase("glm-4.7", 4096),
    UpdateCase("glm-4.7", 8192, recompute="selective"),
    UpdateCase("glm-4.7", 4096, precision=FP8),
    UpdateCase("qwen2.5-7b", 4096),
    UpdateCase("qwen2.5-7b", 8192, precision=FP8, recompute="selective"),
    UpdateCase("deepseek-v3", 6144, recompute="selective"),
    UpdateCase("deepseek-v3", 4096, precision=FP8),
    UpdateCase("kimi-k2", 2048),
    UpdateCase("kimi-k2", 6144, precision=FP8, recompute="selective"),
    UpdateCase("qwen3-235b", 6144),
    UpdateCase("llama-3.1-8b", 6144, recompute="selective"),
    UpdateCase("llama-3.1-8b", 4096, precision=FP8),
    UpdateCase("llama-3.1-8b", 2048, LOCAL),
    UpdateCase("glm-4.5-air", 4096, LOCAL, recompute="full"),
)
# Layouts of four GPUs (layouts.py), with 4,096 tokens of a micro-batch on each. Nothing was fitted to these.
LAYOUTS = tuple(
    UpdateCase(model, tokens, precision=precision, layout=layout)
    for precision in (BF16, FP8)
    for model, tokens, layout in (
        ("slice of 2", 8192, Layout(4, tensor=2, expert=2)),
        ("slice of 2", 4096, Layout(4, pipeline=2, expert=2)),
        ("slice of 4", 4096, Layout(4, expert=4)),
        ("slice of 2", 8192, Layout(4, context=2, expert=2)),
    )
)
CASES = {str(case): case for case in (*FITTED, *HELD_OUT, *LAYOUTS)}
