"""Training state and activations that wait in host memory while nothing computes with them."""

from collections.abc import Iterable
from enum import StrEnum

from pydantic import Field

from grpo_operator.api.base import Model
from grpo_operator.api.rules import Rule
from grpo_operator.api.v1alpha1.recompute import RecomputeModule


class OffloadModule(StrEnum):
    """Module of a layer whose kept activations can be offloaded, under Megatron-Core's name."""

    ATTN_NORM = "attn_norm"
    QKV_LINEAR = "qkv_linear"
    CORE_ATTN = "core_attn"
    ATTN_PROJ = "attn_proj"
    MLP_NORM = "mlp_norm"
    EXPERT_FC1 = "expert_fc1"
    MOE_ACT = "moe_act"


# Modules whose kept activations recomputation drops too, or reads before Megatron-Core has copied them back.
RECOMPUTED: dict[RecomputeModule, tuple[OffloadModule, ...]] = {
    RecomputeModule.LAYERNORM: (OffloadModule.QKV_LINEAR,),
    RecomputeModule.MLA_UP_PROJ: (OffloadModule.QKV_LINEAR, OffloadModule.CORE_ATTN),
    RecomputeModule.CORE_ATTN: (OffloadModule.CORE_ATTN,),
    RecomputeModule.MOE: (OffloadModule.EXPERT_FC1, OffloadModule.MOE_ACT),
}


def goes_with(module: OffloadModule, recomputed: Iterable[RecomputeModule]) -> bool:
    """Return whether a module's activations can be offloaded where ``recomputed`` are recomputed."""
    return not any(module in RECOMPUTED.get(other, ()) for other in recomputed)


_OFFLOAD_RULES: tuple[Rule["OffloadSpec"], ...] = (
    Rule(
        "!has(self.activations) || self.activations.all(m, self.activations.exists_one(n, n == m))",
        "activations names a module twice: name each once",
        lambda offload: len(set(offload.activations or ())) == len(offload.activations or ()),
    ),
    Rule(
        "!has(self.activations) || !('attn_proj' in self.activations) || 'core_attn' in self.activations",
        "activations attn_proj needs core_attn, whose backward pass reads the same tensor: add core_attn, or "
        "remove attn_proj",
        lambda offload: (
            OffloadModule.ATTN_PROJ not in (offload.activations or ())
            or OffloadModule.CORE_ATTN in (offload.activations or ())
        ),
    ),
)


class OffloadSpec(Model):
    """Training state and activations that are moved to host memory while they are not in use.

    trainer.resources.memory must be large enough for them.
    """

    rules = _OFFLOAD_RULES
    parameters: bool = Field(
        False,
        description="offload each role's weights (policy, reference, critic) while another role computes",
    )
    gradients: bool = Field(
        False, description="free the gradient buffers outside of the update; nothing is copied"
    )
    optimizer: bool = Field(
        False, description="offload Adam's state and the main weights outside of the optimizer step"
    )
    activations: list[OffloadModule] | None = Field(
        None,
        min_length=1,
        max_length=len(OffloadModule),
        description="modules of each layer whose activations are copied to host memory in the forward pass, "
        "and back in the backward pass, beside computation (Megatron-Core: offload_modules of "
        "fine_grained_activation_offloading). It needs Transformer Engine's kernels, and recompute none, "
        "selective or auto. Tensors of fewer than 2**20 values stay on the GPU",
    )
    auto: bool = Field(
        False,
        description="where the job does not fit with what is offloaded above, let the operator add "
        "optimizer, activations or both: what is fastest by estimated step time",
    )

    def __str__(self) -> str:
        """Return the form in which plans show it."""
        names = [name for name in ("parameters", "gradients", "optimizer") if getattr(self, name)]
        if self.activations:
            names.append(f"activations of {', '.join(self.activations)}")
        return ", ".join(names) or "none"
