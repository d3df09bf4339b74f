"""Training algorithm of a job: the GRPO family and PPO. Fields are named as in verl."""

from typing import Annotated, Literal

from pydantic import Field

from grpo_operator.api.base import Model
from grpo_operator.api.rules import Rule
from grpo_operator.api.v1alpha1.optimizer import CriticOptimizerSpec


class KlControl(Model):
    """Weight of the KL term (verl: algorithm.kl_ctrl)."""

    type: Literal["fixed", "adaptive"] = Field(
        "fixed",
        description="fixed: constant weight. adaptive: adjust the weight to hold targetKl",
    )
    kl_coef: float = Field(
        0.001, ge=0, le=10, description="weight of the KL term; with type adaptive its initial value"
    )
    target_kl: float = Field(0.1, gt=0, le=100, description="adaptive only: target KL divergence, in nats")
    horizon: int = Field(
        10000, ge=1, le=10**9, description="adaptive only: number of samples over which the weight adapts"
    )


class OverlongSpec(Model):
    """DAPO's penalty for responses close to the length limit."""

    buffer_length: int = Field(
        ge=1,
        le=1048576,
        description="number of tokens at the end of responseLength over which the penalty grows",
    )
    penalty: float = Field(1.0, gt=0, le=1000, description="penalty of a response of full length")


class FilterGroupsSpec(Model):
    """DAPO's dynamic sampling: drop groups whose rewards are all equal, because their advantages are zero."""

    max_num_gen_batches: int = Field(
        10,
        ge=1,
        le=1000,
        description="limit of the prompts of one step, in batches of data.trainBatchSize; after them, groups "
        "of equal rewards fill the batch",
    )


class RolloutCorrectionSpec(Model):
    """Truncated importance sampling (TIS) between the engines' and the trainer's probabilities."""

    tis_cap: float = Field(2.0, gt=0, le=1000, description="upper limit of a token's importance weight")


class CriticSpec(Model):
    """PPO's critic: a model with the policy's architecture and a value head, on the trainer's ranks."""

    optimizer: CriticOptimizerSpec = Field(default_factory=CriticOptimizerSpec)
    lam: float = Field(1.0, ge=0, le=1, description="lambda of generalized advantage estimation (GAE)")
    cliprange_value: float = Field(
        0.5, gt=0, le=1000, description="clip range of the value loss: largest change of a value in one step"
    )
    warmup_steps: int = Field(
        0, ge=0, le=10**6, description="initial steps that train only the critic (verl: critic_warmup)"
    )


_STALENESS_RULES: tuple[Rule["StalenessSpec"], ...] = (
    Rule(
        "!self.partialRollouts || self.maxVersionLag > 0",
        "partialRollouts needs maxVersionLag 1",
        lambda staleness: not staleness.partial_rollouts or staleness.max_version_lag > 0,
    ),
)


class StalenessSpec(Model):
    """Off-policy limit: maximum age of the weights that generate the samples of a step."""

    rules = _STALENESS_RULES
    max_version_lag: int = Field(
        0,
        ge=0,
        le=1,
        description="0: on-policy. 1: one step off-policy; samples of the next step are generated while the "
        "current step trains",
    )
    partial_rollouts: bool = Field(
        False,
        description="continue unfinished responses with the new weights instead of delaying the weight "
        "update until they finish; the sample ledger records the weight version of each token",
    )


_ALGORITHM_RULES: tuple[Rule["AlgorithmSpec"], ...] = (
    Rule(
        "(self.advEstimator == 'gae') == has(self.critic)",
        "advEstimator gae needs critic, and the other estimators must not have one",
        lambda algorithm: (algorithm.adv_estimator == "gae") == (algorithm.critic is not None),
    ),
    Rule(
        "self.samplesPerPrompt > 1 || self.advEstimator in ['gae', 'reinforce_plus_plus']",
        "samplesPerPrompt must be at least 2: the other samples of a group are its baseline",
        lambda algorithm: (
            algorithm.samples_per_prompt > 1 or algorithm.adv_estimator in ("gae", "reinforce_plus_plus")
        ),
    ),
    Rule(
        "self.topK != 0",
        "topK must be -1 (all tokens) or at least 1",
        lambda algorithm: algorithm.top_k != 0,
    ),
    Rule(
        "!has(self.refreshReferenceSteps) || self.useKlLoss || self.useKlInReward",
        "refreshReferenceSteps needs useKlLoss or useKlInReward: nothing else uses the reference model",
        lambda algorithm: algorithm.refresh_reference_steps is None or algorithm.needs_reference,
    ),
)


class AlgorithmSpec(Model):
    """Training algorithm: the GRPO family or PPO. Fields are named as in verl."""

    rules = _ALGORITHM_RULES
    adv_estimator: Literal["grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae"] = (
        Field("grpo", description="advantage estimator; for Dr.GRPO use grpo with normAdvByStd: false")
    )
    gamma: float = Field(
        1.0, gt=0, le=1, description="discount factor of future rewards (reinforce_plus_plus, gae)"
    )
    policy_loss: Literal["vanilla", "gspo"] = Field(
        "vanilla", description="vanilla: importance ratios per token. gspo: per sequence"
    )
    samples_per_prompt: int = Field(
        16, ge=1, le=1024, description="group size (verl: rollout.n, which YAML 1.1 reads as false)"
    )
    temperature: float = Field(
        1.0, gt=0, le=10, description="temperature of sampling and of the log-probabilities used in training"
    )
    top_p: float = Field(
        1.0, gt=0, le=1, description="sample from the most likely tokens with this total probability"
    )
    top_k: int = Field(
        -1, ge=-1, le=1048576, description="sample from this number of most likely tokens; -1: all tokens"
    )
    min_p: float = Field(
        0.0, ge=0, lt=1, description="minimum probability of a token, relative to the most likely token"
    )
    stop: list[Annotated[str, Field(min_length=1, max_length=256)]] = Field(
        default_factory=list,
        max_length=16,
        description="texts that end a response; the text stays in the response",
    )
    stop_token_ids: list[Annotated[int, Field(ge=0, le=2**31 - 1)]] = Field(
        default_factory=list,
        max_length=64,
        description="token ids that end a response, in addition to the model's own",
    )
    norm_adv_by_std: bool = Field(
        True, description="divide advantages by the standard deviation of the group's rewards"
    )
    clip_ratio_low: float = Field(
        0.2, gt=0, lt=1, description="clip the importance ratio below 1 minus this value"
    )
    clip_ratio_high: float = Field(
        0.2, gt=0, le=10, description="clip the importance ratio above 1 plus this value"
    )
    clip_ratio_c: float = Field(
        3.0, gt=1, le=100, description="limit of the ratio for negative advantages (dual clip)"
    )
    use_kl_loss: bool = Field(True, description="add the KL divergence from the reference model to the loss")
    kl_loss_type: Literal["k1", "k2", "k3"] = Field("k3", description="estimator of the KL divergence")
    kl_ctrl: KlControl = Field(default_factory=KlControl)
    use_kl_in_reward: bool = Field(False, description="subtract the KL divergence from the rewards")
    entropy_coef: float = Field(0.0, ge=0, le=10, description="weight of the entropy bonus in the loss")
    loss_agg_mode: Literal[
        "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
    ] = Field(
        "token-mean",
        description="aggregation of token losses: mean over all tokens, or mean over sequences of the "
        "tokens' mean, sum, or sum divided by data.responseLength (norm, as in Dr.GRPO)",
    )
    overlong: OverlongSpec | None = None
    filter_groups: FilterGroupsSpec | None = None
    rollout_correction: RolloutCorrectionSpec | None = None
    max_log_prob_gap: float = Field(
        0.1,
        gt=0,
        le=100,
        description="largest mean difference (nats) between the log-probabilities of trainer and engines on "
        "the first samples of an attempt; with a larger one the job refuses to train",
    )
    min_router_agreement: float = Field(
        0.9,
        ge=0,
        le=1,
        description="smallest share of the engines' routing decisions that the trainer's routers must "
        "reproduce on the first samples of an attempt (checked with routingReplay)",
    )
    routing_replay: bool = Field(
        False,
        description="train with the experts that the engines selected (rollout routing replay, R3); needs "
        "engine.returnRoutedExperts",
    )
    critic: CriticSpec | None = None
    refresh_reference_steps: int | None = Field(
        None,
        ge=1,
        le=10**6,
        description="number of steps between copies of the policy to the reference model; default: never",
    )

    @property
    def needs_reference(self) -> bool:
        """Return whether the loss or the rewards use the reference model."""
        return self.use_kl_loss or self.use_kl_in_reward
