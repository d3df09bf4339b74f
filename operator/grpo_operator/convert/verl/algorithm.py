"""Options of verl for the algorithm and the critic."""

from typing import Any

from grpo_operator.convert.remedies import (
    LORA,
    UNKNOWN,
)
from grpo_operator.convert.rules import (
    Always,
    Fact,
    Missing,
    Refused,
    Table,
    Take,
    choice,
    integer,
    optional,
    real,
    truth,
)
from grpo_operator.convert.verl.names import ACTOR, CRITIC, ROLLOUT


def _temperature(value: Any) -> float:
    if real(value) <= 0:
        raise ValueError("training needs samples: write a temperature above 0")
    return float(value)


def _top_k(value: Any) -> int:
    return -1 if value in (None, 0, -1) else integer(value)


def _kl_penalty(value: Any) -> bool:
    if value not in ("kl", "k1"):
        raise ValueError("rewards lose the estimate k1 of the divergence: write kl")
    return True


def _epochs(value: Any) -> int:
    if integer(value) != 1:
        raise ValueError("each batch is trained on once: write 1, and smaller mini-batches for more updates")
    return 1


def _is_thresholded(value: Any) -> str | None:
    if value in (None, "null", "none"):
        return None
    if value != "token":
        raise ValueError("rolloutCorrection weights tokens: write token or null")
    return "token"


ALGORITHM: Table = {
    "algorithm.adv_estimator": Take(
        "algorithm.advEstimator",
        choice(
            grpo="grpo", gae="gae", rloo="rloo", reinforce_plus_plus="reinforce_plus_plus",
            reinforce_plus_plus_baseline="reinforce_plus_plus_baseline", grpo_vectorized="grpo",
            rloo_vectorized="rloo",
        ),
    ),
    "algorithm.norm_adv_by_std_in_grpo": Take("algorithm.normAdvByStd", truth),
    "algorithm.gamma": Take("algorithm.gamma", real),
    "algorithm.lam": Take("algorithm.critic.lam", real),
    "algorithm.use_kl_in_reward": Fact("use_kl_in_reward", "algorithm.useKlInReward", truth),
    "algorithm.kl_penalty": Fact("kl_penalty", "always so in rewards", _kl_penalty),
    "algorithm.kl_ctrl.type": Take("algorithm.klCtrl.type", choice(fixed="fixed", adaptive="adaptive")),
    "algorithm.kl_ctrl.kl_coef": Fact("kl_reward_coef", "algorithm.klCtrl.klCoef, with useKlInReward", real),
    "algorithm.kl_ctrl.target_kl": Take("algorithm.klCtrl.targetKl", real),
    "algorithm.kl_ctrl.horizon": Take("algorithm.klCtrl.horizon", integer),
    "algorithm.use_pf_ppo": Refused("samples are not reweighted by their rewards: remove it"),
    "algorithm.pf_ppo.*": Missing("see algorithm.use_pf_ppo"),
    "algorithm.filter_groups.enable": Fact("filter_groups", "algorithm.filterGroups", truth),
    "algorithm.filter_groups.max_num_gen_batches": Fact(
        "filter_batches", "algorithm.filterGroups.maxNumGenBatches", integer
    ),
    "algorithm.filter_groups.metric": Always("groups are compared by their rewards"),
    "algorithm.rollout_correction.rollout_is": Fact(
        "tis", "algorithm.rolloutCorrection", _is_thresholded
    ),
    "algorithm.rollout_correction.rollout_is_threshold": Fact(
        "tis_cap", "algorithm.rolloutCorrection.tisCap", real
    ),
    "algorithm.rollout_correction.rollout_rs": Refused("samples are weighted, not rejected: write null"),
    "algorithm.rollout_correction.rollout_rs_threshold": Missing("see rollout_rs"),
    "algorithm.rollout_correction.bypass_mode": Refused(
        "the trainer always computes the old log-probabilities: write false"
    ),
    "algorithm.rollout_correction.loss_type": Missing(
        "the loss is clipped by algorithm.clipRatioLow and clipRatioHigh", ("ppo_clip", None)
    ),
    "algorithm.rollout_correction.rollout_is_batch_normalize": Refused(
        "weights are not normalized over a batch: write false"
    ),
    f"{ACTOR}.tis_imp_ratio_cap": Fact(
        "tis_cap_older", "algorithm.rolloutCorrection.tisCap", optional(real)
    ),
    f"{ACTOR}.policy_loss.loss_mode": Take("algorithm.policyLoss", choice(vanilla="vanilla", gspo="gspo")),
    f"{ACTOR}.policy_loss.*": Missing("belongs to a loss mode that jobs do not have"),
    f"{ACTOR}.clip_ratio": Fact("clip_ratio", "algorithm.clipRatioLow and clipRatioHigh", real),
    f"{ACTOR}.clip_ratio_low": Take("algorithm.clipRatioLow", real),
    f"{ACTOR}.clip_ratio_high": Take("algorithm.clipRatioHigh", real),
    f"{ACTOR}.clip_ratio_c": Take("algorithm.clipRatioC", real),
    f"{ACTOR}.use_kl_loss": Fact("use_kl_loss", "algorithm.useKlLoss", truth),
    f"{ACTOR}.kl_loss_coef": Fact("kl_loss_coef", "algorithm.klCtrl.klCoef, with useKlLoss", real),
    f"{ACTOR}.kl_loss_type": Take(
        "algorithm.klLossType", choice(low_var_kl="k3", k3="k3", kl="k1", k1="k1", mse="k2", k2="k2")
    ),
    f"{ACTOR}.entropy_coeff": Take("algorithm.entropyCoef", real),
    f"{ACTOR}.loss_agg_mode": Take(
        "algorithm.lossAggMode",
        choice(**{
            mode: mode
            for mode in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
        }),
    ),
    f"{ACTOR}.loss_scale_factor": Refused("seq-mean-token-sum-norm divides by responseLength: write null"),
    f"{ACTOR}.ppo_epochs": Fact("ppo_epochs", "always so", _epochs),
    f"{ACTOR}.shuffle": Always("mini-batches are taken in the order of the batch", (False, None)),
    f"{ACTOR}.tau_pos": Missing("belongs to a loss mode that jobs do not have", (1.0,)),
    f"{ACTOR}.tau_neg": Missing("belongs to a loss mode that jobs do not have", (1.05,)),
    f"{ACTOR}.router_replay.mode": Fact(
        "routing_replay", "algorithm.routingReplay", choice(disabled="", R3="R3")
    ),
    f"{ROLLOUT}.enable_rollout_routing_replay": Always("as algorithm.routingReplay"),
    f"{ROLLOUT}.n": Take("algorithm.samplesPerPrompt", integer),
    f"{ROLLOUT}.temperature": Take("algorithm.temperature", _temperature),
    f"{ROLLOUT}.top_p": Take("algorithm.topP", real),
    f"{ROLLOUT}.top_k": Take("algorithm.topK", _top_k),
    f"{ROLLOUT}.do_sample": Always("responses are sampled", (True,)),
    f"{ROLLOUT}.ignore_eos": Refused("responses end at the end token: write false"),
    f"{ROLLOUT}.calculate_log_probs": Always("engines return log-probabilities"),
    "algorithm.*": Refused(UNKNOWN),
    "trainer.critic_warmup": Fact("critic_warmup", "algorithm.critic.warmupSteps", integer),
}  # fmt: skip
CRITIC_OPTIONS: Table = {
    f"{CRITIC}.enable": Always("advEstimator gae has a critic"),
    f"{CRITIC}.optim.lr": Take("algorithm.critic.optimizer.lr", real),
    f"{CRITIC}.optim.weight_decay": Take("algorithm.critic.optimizer.weightDecay", real),
    f"{CRITIC}.optim.lr_warmup_steps": Fact(
        "critic_warmup_steps", "algorithm.critic.optimizer.lrWarmupSteps", optional(integer)
    ),
    f"{CRITIC}.optim.lr_warmup_steps_ratio": Fact(
        "critic_warmup_ratio", "algorithm.critic.optimizer.lrWarmupSteps", real
    ),
    f"{CRITIC}.optim.betas": Fact("critic_betas", "algorithm.critic.optimizer.adamBeta1 and adamBeta2", list),
    f"{CRITIC}.optim.clip_grad": Take("algorithm.critic.optimizer.clipGrad", real),
    f"{CRITIC}.cliprange_value": Take("algorithm.critic.cliprangeValue", real),
    f"{CRITIC}.ppo_epochs": Fact("ppo_epochs", "always so", _epochs),
    f"{CRITIC}.model.path": Fact("critic_model", "algorithm.critic", str, text=True),
    f"{CRITIC}.ppo_mini_batch_size": Fact("critic_mini_batch", "trainer.miniBatchSize", integer),
    f"{CRITIC}.model.lora_rank": Refused(LORA),
    f"{CRITIC}.*": Always("the critic has the policy's architecture, layout and batches"),
}
