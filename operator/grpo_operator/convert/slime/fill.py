"""slime: its options, its defaults, and what follows from them."""

from typing import Any

from grpo_operator.convert.draft import Draft
from grpo_operator.convert.reading.source import Source
from grpo_operator.convert.rules import Table
from grpo_operator.convert.slime.sampling import ALGORITHM, DATA
from grpo_operator.convert.slime.training import ENGINES_OF_SLIME, RUN, TRAINER

TABLE: Table = {**ALGORITHM, **DATA, **TRAINER, **ENGINES_OF_SLIME, **RUN}
# What slime, and Megatron-LM below it, do where a script is silent, if jobs do something else then.
DEFAULTS: dict[str, Any] = {
    "--advantage-estimator": "grpo",
    "--n-samples-per-prompt": 1,
    "--kl-loss-type": "k1",
    "--adam-beta2": 0.999,
    "--lr-decay-style": "linear",
    "--rollout-num-gpus-per-engine": 1,
    "--actor-num-nodes": 1,
    "--actor-num-gpus-per-node": 8,
    "--input-key": "input",
}
_PROMPT = 2048  # tokens of a prompt, where nothing limits it
_NO_DUAL_CLIP = 100.0  # the largest algorithm.clipRatioC


def fill(draft: Draft, source: Source) -> None:
    """Take the options of slime over."""
    for option in source.options:
        name = option.name.removeprefix("--").replace("-", "_")
        if option.name not in TABLE and name.startswith("moe_"):
            draft.megatron(option, name)
        else:
            draft.read([option], TABLE)
    draft.assume(DEFAULTS, source, TABLE, "slime")
    _losses(draft, source)
    _prompts(draft, source)
    if draft.fact("program") == "train_async.py":
        draft.take("staleness.maxVersionLag", 1)
        draft.taken.append("train_async.py -> staleness.maxVersionLag")
    if not draft.fact("colocated", False) and draft.fact("rollout_gpus") is None:
        draft.errors.append("--rollout-num-gpus is missing: add it to the script, or --colocate")
    if draft.fact("colocated", False):
        draft.facts.pop("rollout_gpus", None)


def _estimator(source: Source) -> str:
    option = source.get("--advantage-estimator")
    return str(option.value) if option else "grpo"


def _losses(draft: Draft, source: Source) -> None:
    if _estimator(source) == "gspo":
        draft.take("algorithm.policyLoss", "gspo")
    mode = "token-mean" if draft.fact("per_token", False) else "seq-mean-token-mean"
    draft.choose("algorithm.lossAggMode", mode, "as slime aggregates the losses of tokens")
    low = draft.fields.get("algorithm.clipRatioLow", 0.2)
    draft.fields.setdefault("algorithm.clipRatioHigh", low)
    if "algorithm.clipRatioC" not in draft.fields:
        reason = "slime clips twice only with --eps-clip-c: this limit is out of reach"
        draft.choose("algorithm.clipRatioC", _NO_DUAL_CLIP, reason)
    draft.facts["use_kl_in_reward"] = draft.fact("kl_reward_coef", 0) > 0
    draft.facts.setdefault("kl_loss_coef", 0.0)
    whitened = _estimator(source) in ("reinforce_plus_plus", "reinforce_plus_plus_baseline")
    if draft.fact("whiten", False) and not whitened:
        draft.refuse("whiten", "advantages are normalized within groups only: remove it")


def _prompts(draft: Draft, source: Source) -> None:
    response = int(draft.fields.get("data.responseLength", 0))
    if not response:
        draft.errors.append("--rollout-max-response-len is missing: add it to the script")
        draft.fields["data.responseLength"] = 1
    if "data.promptLength" not in draft.fields:
        total = draft.fact("context_length")
        if total and total > response:
            draft.choose(
                "data.promptLength", total - response, "--rollout-max-context-len without the response"
            )
        else:
            draft.choose("data.promptLength", _PROMPT, "slime has no limit: longer prompts would be skipped")
    if not source.get("--apply-chat-template"):
        draft.choose("data.raw", True, "the script has no --apply-chat-template")
    if not source.get("--rollout-shuffle"):
        draft.missing.append(
            "--rollout-shuffle is not set: epochs are shuffled: data.order names a function that keeps the "
            "order"
        )
    if not source.get("--label-key"):
        draft.choose("data.answerKey", "label", "the script has no --label-key")
