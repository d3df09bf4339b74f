"""Refusal of passes without gradients that are too large (pure)."""

from dataclasses import replace

from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.plan.planner.engines.room import gigabytes
from grpo_operator.plan.planner.training.search import TrainingPool, worst


def log_prob_problem(training: TrainingPool, layout: Layout) -> str | None:
    """Return why passes without gradients do not fit, or None where smaller ones would not help."""
    stage = worst(training.memory(layout))
    smaller = replace(training, log_prob_micro_batch=None, log_prob_max_tokens=None)
    usable = training.gpu.usable
    if stage.total <= usable or worst(smaller.memory(layout)).total > usable:
        return None
    field, value, least = _size(training)
    need = stage.activations + stage.working
    return (
        f"spec.trainer.{field}={value}: a pass without gradients needs {gigabytes(need)} beside "
        f"{gigabytes(stage.total - need)} on each GPU of stage {stage.stage + 1}, but {gigabytes(usable)} "
        f"are usable: lower it (the update has {least}), or remove it"
    )


def lower_log_probs(training: TrainingPool) -> str:
    """Return the beginning of a remedy: to lower the size of passes without gradients, where it is set."""
    field, value, least = _size(training)
    return "" if value is None or value <= least else f"lower spec.trainer.{field}={value}, "


def _size(training: TrainingPool) -> tuple[str, int | None, int]:
    """Return field, value and the update's value of the size of passes without gradients."""
    if training.max_tokens is not None:
        return "logProbMaxTokensPerGpu", training.log_prob_max_tokens, training.max_tokens
    return "logProbMicroBatchSizePerGpu", training.log_prob_micro_batch, training.micro_batch
