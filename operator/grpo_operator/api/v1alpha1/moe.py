"""Experts of models with a mixture of experts (MoE): their balance, and how tokens reach them."""

from enum import StrEnum

from pydantic import Field

from grpo_operator.api.base import Model

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

    def problem(self, model_type: str) -> str | None:
        """Return why a model cannot be trained with these values, or None. ``model_type``: of config.json."""
        changed = [name for name, value in MoeSpec() if getattr(self, name) != value]
        if model_type in _DENSE and changed:
            return f"{self._given(changed[0])}: a {model_type} model has no experts: remove spec.trainer.moe"
        if model_type not in WITH_EXPERT_BIAS and "bias_update_rate" in changed:
            given = self._given("bias_update_rate")
            return f"{given}: the routers of a {model_type} model have no expert bias: remove the field"
        return None

    def _given(self, name: str) -> str:
        value = getattr(self, name)
        text = value if isinstance(value, str) else f"{value:g}"
        return f"spec.trainer.moe.{type(self).model_fields[name].alias}={text}"
