"""The algorithm of a job: GRPO, with keys named as in verl."""

from typing import Literal

from pydantic import Field

from grpo_operator.api.base import Model


class KlControl(Model):
    """Weight of the KL term (verl: algorithm.kl_ctrl)."""

    type: Literal["fixed", "adaptive"] = Field("fixed", description="adaptive: hold targetKl")
    kl_coef: float = Field(0.001, ge=0, le=10, description="weight, or first weight, of the KL term")
    target_kl: float = Field(0.1, gt=0, le=100, description="adaptive only: KL to hold, in nats")
    horizon: int = Field(10000, ge=1, le=10**9, description="adaptive only: samples to adapt over")


class AlgorithmSpec(Model):
    """GRPO; keys named as in verl where YAML allows."""

    adv_estimator: Literal["grpo"] = Field("grpo", description="how rewards become advantages")
    samples_per_prompt: int = Field(
        16, ge=2, le=1024, description="group size (verl: rollout.n; YAML reads a bare n as false)"
    )
    temperature: float = Field(1.0, gt=0, le=10, description="of sampling, and of the log-probs trained on")
    norm_adv_by_std: bool = Field(True, description="divide by the group's standard deviation")
    clip_ratio_low: float = Field(0.2, gt=0, lt=1, description="the ratio is clipped below 1 minus this")
    clip_ratio_high: float = Field(0.2, gt=0, le=10, description="the ratio is clipped above 1 plus this")
    clip_ratio_c: float = Field(3.0, gt=1, le=100, description="dual clip for negative advantages")
    use_kl_loss: bool = Field(True, description="add the KL divergence from the reference to the loss")
    kl_loss_type: Literal["k1", "k2", "k3"] = Field("k3", description="estimator of the KL divergence")
    kl_ctrl: KlControl = Field(default_factory=KlControl)
    loss_agg_mode: Literal["token-mean", "seq-mean-token-mean"] = Field(
        "token-mean", description="mean over all tokens, or over sequences of their tokens' means"
    )
