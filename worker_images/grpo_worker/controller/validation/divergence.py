"""Divergence: metrics that stay outside of the ranges that the job names (pure)."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from grpo_operator.api.v1alpha1.divergence import DivergenceSpec
from grpo_operator.api.v1alpha1.observability import ThresholdSpec
from grpo_worker.controller.validation.setback import DivergedError, WayBack


class DivergenceWatch:
    """Counts for each limit the latest steps in a row in which its metric was outside.

    The same records give the same result, so a replay decides as the run before it did.
    """

    def __init__(self, spec: DivergenceSpec | None) -> None:
        self._spec = spec
        self._limits: Sequence[ThresholdSpec] = spec.limits if spec else ()
        self._outside = [0] * len(self._limits)
        self._step = 0  # the last one that was noted

    def begin_attempt(self, records: Iterable[Mapping[str, Any]], resumed: int) -> None:
        """Count the steps so far. ``records``: of the metrics. ``resumed``: only later steps count."""
        self._outside = [0] * len(self._limits)
        for record in records if self._spec is not None else ():
            if record["step"] > resumed:
                self.note(record["step"], record)

    def note(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Note the metrics of a finished step. One that it does not have says nothing."""
        self._step = step
        for number, limit in enumerate(self._limits):
            if limit.metric in metrics:
                outside = is_outside(metrics[limit.metric], limit)
                self._outside[number] = self._outside[number] + 1 if outside else 0

    def check(self, total_steps: int, position: Mapping[str, Any]) -> None:
        """Raise DivergedError if a metric was outside in enough steps, unless all steps are done.

        ``position``: state of the source of prompts behind those that were drawn.
        """
        if self._spec is None or self._step >= total_steps:
            return
        for limit, outside in zip(self._limits, self._outside, strict=True):
            if outside >= self._spec.steps:
                rollback = self._spec.on_divergence == "rollback"
                back = WayBack(self._step - outside, dict(position), exact=False) if rollback else None
                beyond = f"{limit.metric} was {_beyond(limit)}"
                raise DivergedError(
                    f"divergence: {beyond} in {outside} steps in a row, the last of them step {self._step}",
                    "checkpoint.resumeFrom starts another job from an older checkpoint",
                    back,
                    most=self._spec.rollbacks,
                )


def is_outside(value: float, limit: ThresholdSpec) -> bool:
    """Return whether a value is outside of a range; one that is no number is."""
    low = limit.minimum is None or value >= limit.minimum
    high = limit.maximum is None or value <= limit.maximum
    return not (low and high)


def _beyond(limit: ThresholdSpec) -> str:
    low = [] if limit.minimum is None else [f"below {limit.minimum:g}"]
    high = [] if limit.maximum is None else [f"above {limit.maximum:g}"]
    return f"{' or '.join([*low, *high])}, or no number,"
