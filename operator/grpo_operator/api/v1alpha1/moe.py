"""Experts of models with a mixture of experts (MoE): their balance, and how tokens reach them."""

from enum import StrEnum

from pydantic import Field

from grpo_operator.api.base import Model
from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.api.v1alpha1.recompute import Recompute, RecomputeKind, RecomputeModule

_DENSE = ("llama", "qwen2", "qwen3")
# Their routers score experts by sigmoid and choose them with a bias.
WITH_EXPERT_BIAS = ("deepseek_v3", "glm4_moe", "kimi_k2")


class TokenDispatcher(StrEnum):
    """Way of tokens to the GPUs of their experts."""

    AUTO = "auto"
    ALLTOALL = "alltoall"
    DEEPEP = "deepep"


class MoeSpec(Model):
    """Experts of an MoE model in training. Padding does not count in their balance."""

    bias_update_rate: float = Field(
        0.001,
        ge=0,
        le=1,
        description="change of each expert's bias after an optimizer step: up for experts that got fewer "
        "tokens than the mean, down for others. 0 freezes the bias. Models with an expert bias only: "
        "DeepSeek-V3, Kimi-K2 and GLM-4.5 to 4.7 (Megatron-Core: moe_router_bias_update_rate)",
    )
    aux_loss_coefficient: float = Field(
        0.0,
        ge=0,
        le=1,
        description="weight of the load-balancing loss of each MoE layer, computed for each micro-batch; "
        "0: none (Megatron-Core: moe_aux_loss_coeff of the type aux_loss)",
    )
    dispatcher: TokenDispatcher = Field(
        TokenDispatcher.AUTO,
        description="how tokens reach the GPUs of their experts. alltoall: NCCL's all-to-all. deepep: "
        "DeepEP, which needs its package deep_ep in the trainer image, Transformer Engine's kernels, "
        "expert > 1 and, where a layer's experts span nodes, 8 GPUs per node. auto: deepep where all of this "
        "is there, otherwise alltoall; the ranks log which, and why (Megatron-Core: "
        "moe_token_dispatcher_type)",
    )
    overlap_communication: bool = Field(
        False,
        description="exchange the tokens of one micro-batch between the GPUs of their experts while another "
        "one computes: the forward pass of each layer runs beside the backward pass of an earlier "
        "micro-batch, whose activations stay in memory. It needs device cuda, expert > 1, with pipeline > 1 "
        "also virtualPipeline > 1, and excludes recompute full, recomputeModules moe and "
        "multiTokenPrediction (Megatron-Core: overlap_moe_expert_parallel_comm)",
    )

    def problem(self, model_type: str) -> str | None:
        """Return why a model cannot be trained with these values, or None. ``model_type``: of config.json."""
        changed = [name for name, value in MoeSpec() if getattr(self, name) != value]
        if model_type in _DENSE and changed:
            return f"{self._given(changed[0])}: a {model_type} model has no experts: remove spec.trainer.moe"
        if model_type not in WITH_EXPERT_BIAS and "bias_update_rate" in changed:
            given = self._given("bias_update_rate")
            return f"{given}: the routers of a {model_type} model have no expert bias: remove the field"
        return None

    def overlap_problem(self, layout: Layout, recompute: Recompute) -> str | None:
        """Return why communication cannot overlap in this layout, or None; also if the job does not ask.

        The message begins below ``spec.trainer``.
        """
        if not self.overlap_communication:
            return None
        obstacle = _overlap_obstacle(layout, recompute)
        return obstacle and f"moe.overlapCommunication=true: {obstacle}, or overlapCommunication to false"

    def _given(self, name: str) -> str:
        value = getattr(self, name)
        text = value if isinstance(value, str) else "true" if value is True else f"{value:g}"
        return f"spec.trainer.moe.{type(self).model_fields[name].alias}={text}"


def _overlap_obstacle(layout: Layout, recompute: Recompute) -> str | None:
    """Return what is in the way of Megatron-Core's combined schedule and its remedy, or None."""
    if layout.expert == 1:
        return "no token leaves its rank with parallelism.expert=1: set expert above 1"
    if layout.pipeline > 1 and layout.virtual_pipeline == 1:
        return (
            f"only an interleaved schedule has steps whose forward and backward pass are independent, and "
            f"parallelism.pipeline={layout.pipeline} has virtualPipeline=1: set virtualPipeline above 1"
        )
    if recompute.kind is RecomputeKind.FULL:
        return "the layers run in parts, and recompute=full needs whole ones: set recompute to selective"
    if RecomputeModule.MOE in recompute.modules:
        return "the experts run in parts, and recomputeModules has moe: set recomputeModules without moe"
    return None
