"""Fields that follow from several options, the same way for all frameworks."""

import json

from grpo_operator.convert.choices import Choices
from grpo_operator.convert.draft import Draft
from grpo_operator.convert.fields.data import place_data
from grpo_operator.convert.fields.models import place_model
from grpo_operator.convert.fields.pools import place_pools
from grpo_operator.convert.fields.rewards import place_reward
from grpo_operator.convert.fields.training import place_batches, place_group, place_kl, place_steps
from grpo_operator.convert.fields.validation import place_validation
from grpo_operator.convert.reading.source import Source

_MOST_BATCHES = 1000  # of algorithm.filterGroups.maxNumGenBatches


def finish(draft: Draft, choices: Choices) -> None:
    """Set the fields that facts decide about."""
    place_model(draft)
    place_data(draft)
    _clips(draft)
    place_kl(draft)
    place_group(draft)
    place_reward(draft, choices.reward)
    place_validation(draft)
    place_batches(draft)
    place_steps(draft, choices)
    place_pools(draft, choices)
    _betas(draft)
    _filter(draft)
    _corrections(draft)
    _recomputation(draft)
    _destinations(draft)
    if stop := draft.fact("stop"):
        draft.take("algorithm.stop", stop)
        draft.choose("rollout.template.engine.tokenizer", True, "algorithm.stop compares texts")


def chat_variables(draft: Draft, source: Source, prefix: str) -> None:
    """Set variables of the chat template from the options that begin with ``prefix``."""
    given = [option for option in source.options if option.name.startswith(prefix)]
    if given:
        values = {option.name.removeprefix(prefix): json.dumps(option.value) for option in given}
        draft.take("data.chatTemplateKwargs", values)
        draft.taken += [f"{option} -> data.chatTemplateKwargs" for option in given]


def _clips(draft: Draft) -> None:
    """Set both clip ratios from one, where the source has no others."""
    if (both := draft.fact("clip_ratio")) is not None:
        draft.fields.setdefault("algorithm.clipRatioLow", both)
        draft.fields.setdefault("algorithm.clipRatioHigh", both)


def _betas(draft: Draft) -> None:
    for fact, field in (("betas", "trainer.optimizer"), ("critic_betas", "algorithm.critic.optimizer")):
        if fact == "critic_betas" and draft.fields.get("algorithm.advEstimator") != "gae":
            continue
        for name, beta in zip(("adamBeta1", "adamBeta2"), draft.fact(fact, []), strict=False):
            draft.take(f"{field}.{name}", beta)


def _filter(draft: Draft) -> None:
    if not draft.fact("filter_groups", False):
        return
    batches = draft.fact("filter_batches")
    if batches is None or batches < 1:
        reason = "the source has no limit" if batches is not None else "the source says none"
        draft.choose("algorithm.filterGroups.maxNumGenBatches", _MOST_BATCHES, reason)
    else:
        draft.take("algorithm.filterGroups.maxNumGenBatches", batches)


def _corrections(draft: Draft) -> None:
    if draft.fact("tis"):
        draft.take("algorithm.rolloutCorrection.tisCap", draft.fact("tis_cap", 2.0))
    elif draft.fact("tis_cap_older", -1) > 0:
        draft.take("algorithm.rolloutCorrection.tisCap", draft.fact("tis_cap_older"))
    if draft.fact("routing_replay"):
        draft.take("algorithm.routingReplay", True)
        draft.choose("rollout.template.engine.returnRoutedExperts", True, "algorithm.routingReplay needs it")


def _recomputation(draft: Draft) -> None:
    """Set the layers or modules that recompute, as Megatron-Core counts them."""
    kind = draft.fields.get("trainer.recompute")
    layers, method = draft.fact("recompute_layers"), draft.fact("recompute_method")
    if kind == "full" and method == "block" and layers:
        draft.take("trainer.recomputeLayers", layers)
    modules = draft.fact("recompute_modules")
    if kind == "selective" and isinstance(modules, list):
        inner = ("moe_act", "shared_experts") if "moe" in modules else ()
        draft.take("trainer.recomputeModules", [name for name in modules if name not in inner])


def _destinations(draft: Draft) -> None:
    loggers = draft.fact("loggers", [])
    loggers = loggers if isinstance(loggers, list) else [loggers]
    project = str(draft.fact("wandb_project", "grpo"))
    project = "grpo" if "$" in project else project
    if "wandb" in loggers or draft.fact("wandb", False):
        draft.take("observability.wandb.project", project)
        draft.chosen.append("observability.wandb: set WANDB_API_KEY in controller.podTemplate")
    if "trackio" in loggers:
        draft.take("observability.trackio.project", project)
        draft.chosen.append("observability.trackio: add trackio to the image")
    for logger in loggers:
        if logger not in ("wandb", "trackio", "console", "tensorboard"):
            draft.missing.append(
                f"logger {logger}: metrics.jsonl, TensorBoard, W&B, MLflow and trackio are there"
            )
