"""Options of slime for the algorithm, the data and the rewards."""

import json
from typing import Any

from grpo_operator.convert.fields.data import paths
from grpo_operator.convert.remedies import TURNS
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

_NONZERO = "check_reward_nonzero_std"


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _filter(value: Any) -> bool:
    if not str(value).endswith(_NONZERO):
        raise ValueError(f"filterGroups drops groups of equal rewards: use {_NONZERO}, or data.filter")
    return True


def _prompt_files(value: Any) -> list[str]:
    return [path.split("@", 1)[0] for path in paths(value)]


def _chat(value: Any) -> dict[str, str]:
    found = value if isinstance(value, dict) else json.loads(str(value))
    return {name: json.dumps(content) for name, content in found.items()}


ALGORITHM: Table = {
    "--advantage-estimator": Take(
        "algorithm.advEstimator",
        choice(
            grpo="grpo", gspo="grpo", reinforce_plus_plus="reinforce_plus_plus",
            reinforce_plus_plus_baseline="reinforce_plus_plus_baseline", ppo="gae",
        ),
    ),
    "--eps-clip": Take("algorithm.clipRatioLow", real),
    "--eps-clip-high": Take("algorithm.clipRatioHigh", real),
    "--eps-clip-c": Take("algorithm.clipRatioC", real),
    "--value-clip": Take("algorithm.critic.cliprangeValue", real),
    "--kl-coef": Fact("kl_reward_coef", "algorithm.useKlInReward and klCtrl.klCoef", real),
    "--use-kl-loss": Fact("use_kl_loss", "algorithm.useKlLoss", truth),
    "--kl-loss-coef": Fact("kl_loss_coef", "algorithm.klCtrl.klCoef, with useKlLoss", real),
    "--kl-loss-type": Take("algorithm.klLossType", choice(k1="k1", k2="k2", k3="k3", low_var_kl="k3")),
    "--use-unbiased-kl": Refused("the estimators of the divergence are k1, k2 and k3: remove it"),
    "--entropy-coef": Take("algorithm.entropyCoef", real),
    "--gamma": Take("algorithm.gamma", real),
    "--lambd": Take("algorithm.critic.lam", real),
    "--num-critic-only-steps": Take("algorithm.critic.warmupSteps", integer),
    "--critic-lr": Take("algorithm.critic.optimizer.lr", real),
    "--normalize-advantages": Fact("whiten", "algorithm.advEstimator", truth),
    "--disable-grpo-std-normalization": Take("algorithm.normAdvByStd", lambda value: not truth(value)),
    "--disable-rewards-normalization": Refused("advantages are relative to the group: remove it"),
    "--calculate-per-token-loss": Fact("per_token", "algorithm.lossAggMode", truth),
    "--use-tis": Fact("tis", "algorithm.rolloutCorrection", truth),
    "--tis-clip": Fact("tis_cap", "algorithm.rolloutCorrection.tisCap", real),
    "--tis-clip-low": Refused("importance weights have an upper limit only: write 0", (0, 0.0)),
    "--custom-tis-function-path": Refused("importance weights are truncated, per token: remove it"),
    "--custom-config-path": Refused("the file's options are unknown here: remove it"),
    "--use-rollout-logprobs": Refused("the trainer always computes the old log-probabilities: remove it"),
    "--use-opsm": Refused("sequences are not masked by their age: remove it"),
    "--use-rollout-routing-replay": Fact("routing_replay", "algorithm.routingReplay", truth),
    "--use-routing-replay": Refused("write --use-rollout-routing-replay: the engines' choices are repeated"),
    "--use-opd": Refused("jobs have no teacher: remove it"),
    "--opd-*": Missing("belongs to --use-opd"),
    "--loss-type": Refused("the loss is that of the policy: write policy_loss", ("policy_loss",)),
    "--custom-loss-function-path": Refused("the loss is that of the policy: remove it"),
    "--dynamic-sampling-filter-path": Fact("filter_groups", "algorithm.filterGroups", _filter),
    "--over-sampling-batch-size": Missing("more prompts are generated one by one as filterGroups needs them"),
    "--partial-rollout": Missing("see rollout.overSampleRate and staleness.partialRollouts"),
    "--n-samples-per-prompt": Take("algorithm.samplesPerPrompt", integer),
    "--rollout-temperature": Take("algorithm.temperature", real),
    "--rollout-top-p": Take("algorithm.topP", real),
    "--rollout-top-k": Take("algorithm.topK", integer),
    "--rollout-stop": Fact("stop", "algorithm.stop", _list),
    "--rollout-stop-token-ids": Take("algorithm.stopTokenIds", _list),
    "--rollout-function-path": Refused(TURNS),
    "--custom-generate-function-path": Refused(TURNS),
}  # fmt: skip
DATA: Table = {
    "--prompt-data": Fact("files", "data.train", _prompt_files, text=True),
    "--input-key": Take("data.promptKey", str),
    "--label-key": Take("data.answerKey", str),
    "--metadata-key": Always("all columns are passed to the reward function"),
    "--tool-key": Refused(TURNS),
    "--multimodal-keys": Refused("jobs train text models only"),
    "--apply-chat-template": Always("data.raw: false"),
    "--apply-chat-template-kwargs": Take("data.chatTemplateKwargs", _chat),
    "--rollout-shuffle": Always("epochs are shuffled"),
    "--rollout-seed": Take("seed", integer),
    "--seed": Always("as --rollout-seed"),
    "--rollout-batch-size": Take("data.trainBatchSize", integer),
    "--rollout-max-prompt-len": Take("data.promptLength", integer),
    "--rollout-max-response-len": Take("data.responseLength", integer),
    "--rollout-max-context-len": Fact("context_length", "data.promptLength", integer),
    "--rm-type": Fact("environment", "reward.builtin", str),
    "--rm-url": Missing("a server that takes {items: [...]} and answers {scores: [...]}: add --reward URL"),
    "--custom-rm-path": Fact("custom_reward", "reward.function", str, text=True),
    "--group-rm": Missing("every response is scored by itself: see reward.function"),
    "--reward-key": Missing("a function of the reward returns a number, or a dict with score", ("score",)),
    "--eval-reward-key": Missing("jobs do not validate"),
    "--global-batch-size": Fact("mini_batch_samples", "trainer.miniBatchSize", integer),
    "--num-steps-per-rollout": Fact("updates_per_step", "trainer.miniBatchSize", integer),
    "--num-rollout": Fact("steps", "totalSteps", integer),
    "--num-epoch": Fact("epochs", "totalSteps", optional(integer)),
}
