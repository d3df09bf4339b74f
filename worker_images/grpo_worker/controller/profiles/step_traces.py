"""Traces of training steps: that of ``observability.profile``, and those ordered while the job runs."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Literal, Protocol

from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.profile_request import ProfileRequest, ProfileTool
from grpo_worker.controller.profiles.background import of_steps
from grpo_worker.controller.status.profile_orders import ProfileOrders
from grpo_worker.profiling.trace import StepTrace, Traced

log = logging.getLogger(__name__)
Metrics = dict[str, float]
_NSIGHT_FILES = "nsys writes nsight-HOST-PID.nsys-rep to this directory within minutes"


class Ranks(Protocol):
    """The trainer ranks; see TrainerGang."""

    def call(self, method: str, *args: object) -> list[Traced]: ...


class StepTraces:
    """Starts and stops traces on the trainer ranks, one at a time. ``last_step``: of the job.

    Ranks get calls for traced steps only, because every call costs time. An ordered trace waits while it
    would overlap with that of the spec.
    """

    def __init__(self, spec: GRPOJobSpec, folder: Path, orders: ProfileOrders, ranks: Ranks) -> None:
        """``folder``: of the job's profiles."""
        self._spec = spec.observability.profile
        self.last_step = spec.total_steps
        self._folder = folder
        self._orders = orders
        self._ranks = ranks
        self._current: StepTrace | None = None
        self._order = ""  # id of the order that is being recorded
        self._nsight: StepTrace | None = None  # that the ranks have recorded

    def begin_attempt(self) -> None:
        """Prepare for a new gang: what its ranks have recorded so far is lost."""
        if self._order:
            self._orders.failed(self._order, "the trainer ranks were restarted meanwhile: ask again")
        self._current, self._order, self._nsight = None, "", None

    def step(self, step: int, train: Callable[..., Metrics], *args: object) -> Metrics:
        """Call ``train`` with the step and ``args``, traced if that is due.

        Returns the metrics, with the figures of a trace that ends.
        """
        if self._current is None:
            self._current = self._of_spec(step) or self._ordered(step)
            if self._current is None:
                return train(step, *args)
            self._ranks.call("start_trace", self._current)
        metrics = train(step, *args)
        last = min(self._current.last, self.last_step)
        return metrics if step < last else metrics | self._finish(self._current)

    def _of_spec(self, step: int) -> StepTrace | None:
        """Return the spec's trace if it begins with ``step``."""
        spec = self._spec
        if spec is None or spec.steps is None or step != spec.steps[0]:
            return None
        if spec.tool == "nsight" and self._nsight is not None:
            log.warning("steps %d to %d are not traced: %s", *spec.steps, self._nsight_used(self._nsight))
            return None
        return StepTrace(spec.tool, tuple(spec.ranks), *spec.steps, str(self._folder))

    def _ordered(self, step: int) -> StepTrace | None:
        """Return the trace of an order that begins with ``step``."""

        def fits(request: ProfileRequest) -> bool:
            return of_steps(request) and not self._meets_spec(step, step + request.traced_steps - 1)

        order = self._orders.take(fits)
        if order is None:
            return None
        request, last = order.request, min(step + order.request.traced_steps - 1, self.last_step)
        if request.tool is ProfileTool.NSIGHT and self._nsight is not None:
            self._orders.failed(order.id, self._nsight_used(self._nsight))
            return None
        self._order = order.id
        tool: Literal["torch", "nsight"] = "nsight" if request.tool is ProfileTool.NSIGHT else "torch"
        # nsys has got its directory when the ranks were started.
        folder = self._folder if tool == "nsight" else self._folder / order.id
        return StepTrace(tool, request.of_ranks, step, last, str(folder))

    def _meets_spec(self, first: int, last: int) -> bool:
        steps = self._spec.steps if self._spec else None
        return steps is not None and first <= steps[1] and last >= steps[0]

    @staticmethod
    def _nsight_used(trace: StepTrace) -> str:
        return (
            f"nsys records once in the life of the ranks, and it has recorded steps {trace.first} to "
            f"{trace.last}: use torch, or ask again after the ranks were restarted"
        )

    def _finish(self, trace: StepTrace) -> Metrics:
        parts = self._ranks.call("stop_trace")
        order, self._order, self._current = self._order, "", None
        if trace.tool == "nsight":
            self._nsight = trace
        errors = [f"rank {rank}: {part.error}" for rank, part in enumerate(parts) if part.error]
        if errors:
            log.warning("steps %d to %d were not traced: %s", trace.first, trace.last, "; ".join(errors))
        if order and errors:
            self._orders.failed(order, "; ".join(errors))
        elif order:
            files = [part.file for part in parts if part.file]
            self._orders.written(order, trace.folder, files, _NSIGHT_FILES if trace.tool == "nsight" else "")
        return {name: value for part in parts for name, value in part.figures.items()}
