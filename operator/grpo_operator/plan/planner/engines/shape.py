"""Parallel sizes of one SGLang engine and the rules of SGLang 0.5.23 for them (pure)."""

from collections.abc import Iterator
from dataclasses import dataclass

from grpo_operator.plan.planner.model.shape import GqaShape, ModelShape
from grpo_operator.plan.planner.training.rules import FP8_BLOCK


@dataclass(frozen=True, slots=True)
class EngineShape:
    """Parallel sizes of an engine.

    ``tensor``: all GPUs of the engine (SGLang's tp-size). ``expert``: GPUs over which the experts are
    distributed (ep-size). ``attention_data``: replicas of the attention part (dp-size). ``all_to_all``: an
    all-to-all backend carries tokens to their experts (moe-a2a-backend). ``dp_lm_head``: each attention
    replica computes the logits of its own tokens (enable-dp-lm-head). ``drafts``: the model's
    multi-token-prediction layer drafts tokens (speculative-algorithm NEXTN).
    """

    tensor: int
    expert: int = 1
    attention_data: int = 1
    fp8: bool = False
    all_to_all: bool = False
    dp_lm_head: bool = False
    drafts: bool = False

    @property
    def attention_tensor(self) -> int:
        """Return the number of GPUs that share one replica of the attention part."""
        return self.tensor // self.attention_data

    @property
    def dense_tensor(self) -> int:
        """Return the number of GPUs that share a dense feed-forward.

        With several attention replicas each GPU has its own tokens and its own copy (moe-dense-tp-size 1).
        """
        return 1 if self.attention_data > 1 else self.tensor

    @property
    def shared_tensor(self) -> int:
        """Return the number of GPUs that share the shared experts: all, or each has its own copy.

        With an all-to-all backend the shared experts compute a GPU's own tokens.
        """
        return 1 if self.all_to_all else self.tensor

    @property
    def head_tensor(self) -> int:
        """Return the number of GPUs that share the output projection."""
        return self.attention_tensor if self.dp_lm_head else self.tensor

    @property
    def expert_tensor(self) -> int:
        """Return the number of GPUs that share one expert."""
        return self.tensor // self.expert

    @property
    def block(self) -> int:
        """Return the rows that a GPU's part of a matrix must be a multiple of: whole FP8 blocks."""
        return FP8_BLOCK if self.fp8 else 1


def problems(model: ModelShape, engine: EngineShape) -> list[str]:
    """Return why SGLang cannot start; each message has field, value and remedy."""
    return [*_sizes(engine), *_heads(model, engine), *_experts(model, engine), *_drafts(model, engine)]


def _sizes(engine: EngineShape) -> Iterator[str]:
    for field, size in (
        ("expertParallel", engine.expert),
        ("attentionDataParallel", engine.attention_data),
    ):
        if engine.tensor % size:
            yield (
                f"{field}={size} does not divide tensorParallel={engine.tensor}: "
                f"use a divisor of {engine.tensor}"
            )


def _heads(model: ModelShape, engine: EngineShape) -> Iterator[str]:
    size = engine.attention_tensor
    if model.heads % size:
        yield (
            f"tensorParallel={engine.tensor}: {model.heads} attention heads cannot be split over {size} "
            "GPUs: raise attentionDataParallel or use a divisor"
        )
    shape = model.attention
    if isinstance(shape, GqaShape) and shape.kv_heads % size and size % shape.kv_heads:
        yield (
            f"tensorParallel={engine.tensor}: {shape.kv_heads} key-value heads are neither a multiple nor a "
            f"divisor of {size}: use a divisor of {shape.kv_heads}"
        )
    block = engine.block
    if model.dense_layers and model.ffn % block:
        yield (
            f"quantization=fp8-block128: the dense feed-forward width ({model.ffn}) is not a multiple of "
            f"{block}: set quantization to none"
        )
    elif model.dense_layers and model.ffn % (engine.dense_tensor * block):
        yield (
            f"tensorParallel={engine.tensor}: the dense feed-forward width ({model.ffn}) per GPU is not a "
            f"multiple of {block}: use a divisor of {model.ffn // block}, or attentionDataParallel above 1"
        )


def _experts(model: ModelShape, engine: EngineShape) -> Iterator[str]:
    experts = model.experts
    if experts is None:
        if engine.expert > 1:
            yield f"expertParallel={engine.expert}: a {model.model_type} model has no experts: use 1"
        return
    if experts.count % engine.expert:
        yield (
            f"expertParallel={engine.expert}: {experts.count} experts are not divisible by it: "
            f"use a divisor of {experts.count}"
        )
    if engine.all_to_all and engine.expert != engine.tensor:
        yield (
            f"expertParallel={engine.expert}: with moeA2aBackend the experts are distributed over all GPUs: "
            f"use tensorParallel={engine.tensor}"
        )
    block = engine.block
    if experts.shared_ffn % (engine.shared_tensor * block):
        yield (
            f"tensorParallel={engine.tensor}: the width of the shared experts ({experts.shared_ffn}) per "
            f"GPU is not a multiple of {block}: set moeA2aBackend to deepep, or use a divisor of "
            f"{experts.shared_ffn // block}"
        )
    if experts.ffn % (engine.expert_tensor * block):
        yield (
            f"expertParallel={engine.expert}: an expert's width ({experts.ffn}) over tensorParallel / "
            f"expertParallel = {engine.expert_tensor} GPUs is not a multiple of {block}: raise expertParallel"
        )


def _drafts(model: ModelShape, engine: EngineShape) -> Iterator[str]:
    if engine.drafts and model.mtp_layers != 1:
        yield (
            f"speculative=mtp: this {model.model_type} model has num_nextn_predict_layers="
            f"{model.mtp_layers}, and SGLang drafts with exactly one such layer: set speculative to none"
        )
    elif engine.drafts and isinstance(model.attention, GqaShape):
        yield (
            f"speculative=mtp: the trainer has no multi-token-prediction layer of a {model.model_type} "
            "model: set speculative to none"
        )
