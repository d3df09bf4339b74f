"""NeMo-RL: its options, and what follows from them."""

from typing import Any

from grpo_operator.convert.draft import Draft
from grpo_operator.convert.fields.finish import chat_variables
from grpo_operator.convert.fields.models import has_expert_bias
from grpo_operator.convert.nemo_rl.options import TABLE, backend_table
from grpo_operator.convert.reading.source import Option, Source

_OTHER_METHODS = ("distillation", "dpo", "sft", "rm", "ppo", "gdpo", "mopd", "generation", "eval")
_CHAT = "policy.tokenizer.chat_template_kwargs."
_NO_DUAL_CLIP = 100.0  # the largest algorithm.clipRatioC
_UNTRUNCATED = 1000.0  # the largest algorithm.rolloutCorrection.tisCap
_MANY_STEPS = 10**6  # in max_num_steps: as many as the epochs have
_DATASETS = ("data.train.dataset_name", "data.dataset_name", "data.train.data_path", "data.train_data_path")


def fill(draft: Draft, source: Source) -> None:
    """Take the options of NeMo-RL over."""
    sections = {option.name.split(".")[0] for option in source.options}
    if "grpo" not in sections:
        other = next((name for name in _OTHER_METHODS if name in sections), "another method")
        draft.errors.append(f"the configuration has no section grpo: it is of {other}, which no job has")
    megatron = _is_true(source, "policy.megatron_cfg.enabled")
    table = {**TABLE, **backend_table(megatron)}
    prefix = "policy.dtensor_cfg." if megatron else "policy.megatron_cfg."
    draft.read((option for option in source.options if not option.name.startswith((prefix, _CHAT))), table)
    if not megatron:
        _schedulers(draft, source)
    draft.facts["schedule_by_training_step"] = True
    _losses(draft, source)
    _lengths(draft)
    _data(draft, source)
    _scaled_rewards(draft)
    _staleness(draft)
    chat_variables(draft, source, _CHAT)
    if draft.fact("dynamic", False):
        draft.facts["packed"] = True
        draft.facts["max_tokens"] = draft.fact("dynamic_tokens", 16384)
        draft.facts["log_prob_tokens"] = draft.fact("dynamic_log_prob_tokens")
    if (rate := draft.fact("bias_rate")) is not None and has_expert_bias(str(draft.fact("model", ""))):
        draft.take("trainer.moe.biasUpdateRate", rate)
    _steps(draft)
    _resources(draft)


def _is_true(source: Source, name: str) -> bool:
    option = source.get(name)
    return option is not None and str(option.value).lower() == "true"


def _losses(draft: Draft, source: Source) -> None:
    draft.fields.setdefault("algorithm.advEstimator", "grpo")
    if draft.fields["algorithm.advEstimator"] != "grpo" and not draft.fact("minus_baseline", True):
        draft.take("algorithm.advEstimator", "reinforce_plus_plus")
    penalty = draft.fact("kl_loss_coef", 0.0)
    in_reward = _is_true(source, "loss_fn.use_kl_in_reward")
    draft.facts.update(
        use_kl_loss=penalty > 0 and not in_reward, use_kl_in_reward=penalty > 0 and in_reward,
        kl_reward_coef=penalty,
    )  # fmt: skip
    if draft.fact("sequence_ratios", False):
        draft.take("algorithm.policyLoss", "gspo")
    mode = "token-mean" if draft.fact("token_loss", True) else "seq-mean-token-mean"
    draft.take("algorithm.lossAggMode", mode)
    if "algorithm.clipRatioC" not in draft.fields:
        reason = "NeMo-RL clips twice only with ratio_clip_c: this limit is out of reach"
        draft.choose("algorithm.clipRatioC", _NO_DUAL_CLIP, reason)
    if draft.fact("importance", False):
        draft.facts["tis"] = True
        if draft.fact("tis_cap") is None:
            draft.choose(
                "algorithm.rolloutCorrection.tisCap", _UNTRUNCATED, "the source truncates no weights"
            )
            draft.facts["tis_cap"] = _UNTRUNCATED
    normalizes = draft.fields.get("algorithm.normAdvByStd", True)
    if draft.fact("leave_one_out", False) and draft.fields["algorithm.advEstimator"] == "grpo":
        if normalizes:
            draft.lacks(
                "leave_one_out",
                "a group's mean and deviation include the sample itself: advantages are smaller by about 1/n",
            )
        else:
            draft.fields["algorithm.advEstimator"] = "rloo"


def _staleness(draft: Draft) -> None:
    """Set how old samples may be."""
    if not draft.fact("asynchronous", False):
        return
    if draft.fact("lag", 1) > 1:
        draft.refuse("lag", "samples may be one step old: write 1")
    draft.take("staleness.maxVersionLag", 1)
    if draft.fact("in_flight", False):
        draft.take("staleness.partialRollouts", True)


def _scaled_rewards(draft: Draft) -> None:
    """Scale the penalty instead of the rewards: normalized advantages are the same."""
    if not draft.fact("scaled", False):
        return
    source = draft.fact("source_max", 1.0) - draft.fact("source_min", 0.0)
    target = draft.fact("target_max", 1.0) - draft.fact("target_min", 0.0)
    if not draft.fields.get("algorithm.normAdvByStd", True) or source <= 0 or target <= 0:
        draft.refuse("scaled", "rewards are not scaled: scale them in the reward function")
    elif draft.fact("overlong_enable", False):
        penalty = draft.fact("overlong_penalty", 1.0) * source / target
        draft.facts["overlong_penalty"] = penalty
        draft.chosen.append(
            f"algorithm.overlong.penalty: {penalty}: rewards are not scaled, so the penalty is"
        )


def _lengths(draft: Draft) -> None:
    """Split the limit of a whole sample into limits of prompt and response, which a job has."""
    total, response = draft.fact("total_length", 0), draft.fact("new_tokens", 0)
    if not total:
        draft.errors.append("policy.max_total_sequence_length is missing: add it")
        total = 1024
    if response and response < total:
        draft.take("data.responseLength", response)
        draft.choose("data.promptLength", total - response, f"the rest of {total} tokens of a sample")
    else:
        prompt = max(8, total // 4)
        draft.choose("data.promptLength", prompt, f"a quarter of {total} tokens: NeMo-RL limits their sum")
        draft.choose("data.responseLength", total - prompt, f"the rest of {total} tokens")


def _data(draft: Draft, source: Source) -> None:
    names: list[str] = []
    for name in _DATASETS:
        option = source.get(name)
        if option is not None and option.value and "dataset" not in str(option.value).lower():
            names.append(str(option.value))
    train = source.get("data.train")
    for each in train.value if train and isinstance(train.value, list) else []:
        names += [
            str(each[key]) for key in ("data_path", "dataset_name") if isinstance(each, dict) and key in each
        ][:1]
    draft.facts["files"] = [_file(name) for name in names]
    if names:
        reason = "NeMo-RL loads and formats its data sets by code: write prompts and answers to these files"
        draft.choose("data.answerKey", "answer", reason)


def _file(name: str) -> str:
    return name if name.endswith((".parquet", ".jsonl", ".json")) else f"{name.rsplit('/', 1)[-1]}.parquet"


def _steps(draft: Draft) -> None:
    if draft.fact("steps", 0) >= _MANY_STEPS and draft.fact("epochs"):
        draft.facts["steps"] = None


def _resources(draft: Draft) -> None:
    """Set the nodes of the engines, which NeMo-RL takes from those of the cluster."""
    if draft.fact("colocated", True):
        return
    nodes, gpus = draft.fact("nodes", 1), draft.fact("gpus_per_node", 8)
    own_nodes, own_gpus = draft.fact("engine_nodes"), draft.fact("engine_node_gpus")
    if nodes == 1:
        draft.facts["rollout_gpus"] = own_gpus or 0
        draft.facts["trainer_gpus"] = gpus - (own_gpus or 0)
    elif own_nodes:
        draft.facts["nodes"], draft.facts["rollout_gpus"] = nodes - own_nodes, own_nodes * gpus
    else:
        draft.errors.append("policy.generation.colocated.resources.num_nodes is missing: add it")


def _schedulers(draft: Draft, source: Source) -> None:
    """Set the warm-up of PyTorch's schedulers: a linear one, followed by a constant one."""
    option = source.get("policy.scheduler")
    steps: list[dict[str, Any]] = option.value if option and isinstance(option.value, list) else []
    for step in (each for each in steps if isinstance(each, dict) and "name" in each):
        kind, given = str(step["name"]).rsplit(".", 1)[-1], step.get("kwargs") or {}
        if kind == "LinearLR":
            draft.facts["warmup_steps"] = int(given.get("total_iters", 0))
            draft.taken.append("policy.scheduler LinearLR -> trainer.optimizer.lrWarmupSteps")
        elif kind == "CosineAnnealingLR":
            draft.take("trainer.optimizer.lrDecayStyle", "cosine")
            draft.take("trainer.optimizer.minLr", float(given.get("eta_min", 0)))
            draft.taken.append("policy.scheduler CosineAnnealingLR -> trainer.optimizer.lrDecayStyle")
        elif kind != "ConstantLR":
            written = Option("policy.scheduler", step, kind)
            draft.missing.append(f"{written}: constant, linear and cosine decay are there")
