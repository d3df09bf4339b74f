"""Optimizers of the trained models."""

from typing import Literal

from pydantic import Field

from grpo_operator.api.base import Model


class OptimizerSpec(Model):
    """Settings of AdamW, run by Megatron-Core's distributed optimizer."""

    lr: float = Field(1e-6, ge=0, le=1, description="peak learning rate")
    min_lr: float = Field(0.0, ge=0, le=1, description="learning rate at the end of the decay")
    lr_warmup_steps: int = Field(0, ge=0, le=10**7, description="optimizer steps of linear warm-up")
    lr_decay_style: Literal["constant", "linear", "cosine"] = Field(
        "constant",
        description="shape of the decay from the end of the warm-up to the last update of totalSteps",
    )
    weight_decay: float = Field(0.01, ge=0, le=1, description="decoupled weight decay")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="decay rate of the first moment")
    adam_beta2: float = Field(0.95, ge=0, lt=1, description="decay rate of the second moment")
    clip_grad: float = Field(
        1.0, gt=0, le=1000, description="largest global gradient norm; larger gradients are scaled down"
    )


class CriticOptimizerSpec(OptimizerSpec):
    """Settings of the critic's AdamW, run by Megatron-Core's distributed optimizer."""

    lr: float = Field(1e-5, ge=0, le=1, description="peak learning rate")
