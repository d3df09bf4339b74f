"""The algorithm of a job: GRPO, with keys named as in verl."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from grpo_operator.api.base import Model
from grpo_operator.api.v1alpha1.trainer import OptimizerSpec

_TOP_K = "topK must be -1 (all tokens) or at least 1"


class KlControl(Model):
    """Weight of the KL term (verl: algorithm.kl_ctrl)."""

    type: Literal["fixed", "adaptive"] = Field("fixed", description="adaptive: hold targetKl")
    kl_coef: float = Field(0.001, ge=0, le=10, description="weight, or first weight, of the KL term")
    target_kl: float = Field(0.1, gt=0, le=100, description="adaptive only: KL to hold, in nats")
    horizon: int = Field(10000, ge=1, le=10**9, description="adaptive only: samples to adapt over")


class OverlongSpec(Model):
    """DAPO's punishment of answers that are nearly too long."""

    buffer_length: int = Field(ge=1, le=1048576, description="last tokens of responseLength that cost reward")
    penalty: float = Field(1.0, gt=0, le=1000, description="reward lost by an answer of full length")


class FilterGroupsSpec(Model):
    """DAPO's dynamic sampling: groups whose rewards are all equal teach nothing and are left out."""

    max_num_gen_batches: int = Field(
        10, ge=1, le=1000, description="batches to generate for one step before it goes on with less"
    )


class RolloutCorrectionSpec(Model):
    """Truncated importance sampling between the engines' and the trainer's probabilities."""

    tis_cap: float = Field(2.0, gt=0, le=1000, description="largest weight of a token")


class CriticSpec(Model):
    """PPO's critic: a model of the policy's architecture with a value head, on the trainer's ranks."""

    optimizer: OptimizerSpec = Field(default_factory=lambda: OptimizerSpec(lr=1e-5))
    lam: float = Field(1.0, ge=0, le=1, description="decay of later surprises in the advantages (GAE)")
    cliprange_value: float = Field(0.5, gt=0, le=1000, description="largest change of a value in one step")
    warmup_steps: int = Field(
        0, ge=0, le=10**6, description="first steps that train the critic alone (verl: critic_warmup)"
    )


class AlgorithmSpec(Model):
    """The GRPO family and PPO; keys named as in verl where YAML allows."""

    cel = (
        (
            "(self.advEstimator == 'gae') == has(self.critic)",
            "advEstimator gae needs critic, and the others have none",
        ),
        (
            "self.samplesPerPrompt > 1 || self.advEstimator in ['gae', 'reinforce_plus_plus']",
            "samplesPerPrompt must be at least 2: the others of a group are its baseline",
        ),
        ("self.topK != 0", _TOP_K),
        (
            "!has(self.refreshReferenceSteps) || self.useKlLoss || self.useKlInReward",
            "refreshReferenceSteps needs useKlLoss or useKlInReward: nothing else reads the reference",
        ),
    )
    adv_estimator: Literal["grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae"] = (
        Field("grpo", description="how rewards become advantages; Dr.GRPO is grpo without normAdvByStd")
    )
    gamma: float = Field(1.0, gt=0, le=1, description="discount of later rewards (reinforce_plus_plus, gae)")
    policy_loss: Literal["vanilla", "gspo"] = Field(
        "vanilla", description="ratios of tokens, or of whole sequences (gspo)"
    )
    samples_per_prompt: int = Field(
        16, ge=1, le=1024, description="group size (verl: rollout.n; YAML reads a bare n as false)"
    )
    temperature: float = Field(1.0, gt=0, le=10, description="of sampling, and of the log-probs trained on")
    top_p: float = Field(1.0, gt=0, le=1, description="sample from the likeliest tokens of this probability")
    top_k: int = Field(
        -1, ge=-1, le=1048576, description="sample from so many likeliest tokens; -1: from all"
    )
    min_p: float = Field(
        0.0, ge=0, lt=1, description="least probability of a token, as a share of the likeliest one's"
    )
    stop: list[Annotated[str, Field(min_length=1, max_length=256)]] = Field(
        default_factory=list, max_length=16, description="texts that end an answer, which keeps them"
    )
    stop_token_ids: list[Annotated[int, Field(ge=0, le=2**31 - 1)]] = Field(
        default_factory=list, max_length=64, description="tokens that end an answer beside the model's own"
    )
    norm_adv_by_std: bool = Field(True, description="divide by the group's standard deviation")
    clip_ratio_low: float = Field(0.2, gt=0, lt=1, description="the ratio is clipped below 1 minus this")
    clip_ratio_high: float = Field(0.2, gt=0, le=10, description="the ratio is clipped above 1 plus this")
    clip_ratio_c: float = Field(3.0, gt=1, le=100, description="dual clip for negative advantages")
    use_kl_loss: bool = Field(True, description="add the KL divergence from the reference to the loss")
    kl_loss_type: Literal["k1", "k2", "k3"] = Field("k3", description="estimator of the KL divergence")
    kl_ctrl: KlControl = Field(default_factory=KlControl)
    use_kl_in_reward: bool = Field(False, description="take the KL divergence off the rewards")
    entropy_coef: float = Field(
        0.0, ge=0, le=10, description="weight of the policy's entropy, which the loss rewards"
    )
    loss_agg_mode: Literal[
        "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
    ] = Field(
        "token-mean",
        description="mean over all tokens, or over sequences of their tokens' means or sums; norm: sums "
        "divided by data.responseLength (Dr.GRPO)",
    )
    overlong: OverlongSpec | None = None
    filter_groups: FilterGroupsSpec | None = None
    rollout_correction: RolloutCorrectionSpec | None = None
    max_log_prob_gap: float = Field(
        0.1,
        gt=0,
        le=100,
        description="mean difference (nats) of the trainer's and the engines' log-probabilities on an "
        "attempt's first samples, above which the job refuses to train",
    )
    min_router_agreement: float = Field(
        0.9,
        ge=0,
        le=1,
        description="share of the engines' choices of experts that the trainer's routers must make too on "
        "an attempt's first samples (asked with routingReplay)",
    )
    routing_replay: bool = Field(
        False,
        description="the trainer takes the experts that the engines took (R3); needs engines with "
        "returnRoutedExperts",
    )
    critic: CriticSpec | None = None
    refresh_reference_steps: int | None = Field(
        None, ge=1, le=10**6, description="steps after which the policy becomes the reference; default: never"
    )

    @model_validator(mode="after")
    def _check(self) -> "AlgorithmSpec":
        if (self.adv_estimator == "gae") != (self.critic is not None):
            raise ValueError(
                f"advEstimator={self.adv_estimator}: gae needs critic, and the other estimators have none"
            )
        if self.samples_per_prompt < 2 and self.adv_estimator not in ("gae", "reinforce_plus_plus"):
            raise ValueError(
                f"samplesPerPrompt ({self.samples_per_prompt}) must be at least 2: the others of a group are "
                "its baseline"
            )
        if self.top_k == 0:
            raise ValueError(_TOP_K)
        if self.refresh_reference_steps and not self.needs_reference:
            raise ValueError(
                f"refreshReferenceSteps ({self.refresh_reference_steps}) needs useKlLoss or useKlInReward"
            )
        return self

    @property
    def needs_reference(self) -> bool:
        """Does any term compare with the reference model?"""
        return self.use_kl_loss or self.use_kl_in_reward
