"""Traces of selected training steps and ranks, by torch's profiler (for Perfetto) or Nsight Systems."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from grpo_operator.api.v1alpha1.observability import ProfileSpec
from grpo_worker.common.errors import one_line

_COLLECTIVES = ("nccl", "gloo:")  # prefixes of the names of NCCL's kernels and gloo's events
_ALL_GATHER = ("allgather", "all_gather")
_GRADIENTS = ("reducescatter", "reduce_scatter", "allreduce", "all_reduce")
_NSIGHT = {
    "t": "cuda,cudnn,cublas,nvtx",
    "capture-range": "cudaProfilerApi",
    "capture-range-end": "stop-shutdown",
    "kill": "none",
}


def runtime_env(spec: ProfileSpec | None, folder: str) -> dict[str, Any]:
    """Return Ray's runtime environment for the ranks.

    Ranks are numbered after their processes start, so all run under nsys; those that never begin a capture
    write no file.
    """
    if spec is None or spec.tool != "nsight":
        return {}
    return {"nsight": {**_NSIGHT, "o": f"{folder}/nsight-%h-%p"}}


@dataclass(frozen=True, slots=True)
class StepTrace:
    """Trace of the steps ``first`` to ``last`` on some ``ranks``, written to ``folder``."""

    tool: Literal["torch", "nsight"]
    ranks: tuple[int, ...]
    first: int
    last: int
    folder: str

    def file(self, rank: int) -> str:
        """Return the name of a rank's file by torch's profiler."""
        return f"trainer-rank-{rank}-steps-{self.first}-{self.last}.json"


@dataclass(frozen=True, slots=True)
class Traced:
    """A rank's part of a trace: its file's name, and figures (see ``communication``), or why there is none.

    Nsight Systems names and writes its file itself, so ``file`` is "".
    """

    file: str = ""
    figures: dict[str, float] = field(default_factory=dict)
    error: str = ""


class RankTracer:
    """Records the traces of one rank, one after the other. Errors are returned, because they end no step."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._trace: StepTrace | None = None
        self._profiler: torch.profiler.profile | None = None
        self._error = ""

    def start(self, trace: StepTrace) -> None:
        """Start recording, if this is one of the trace's ranks."""
        if self._rank not in trace.ranks:
            return
        self._trace, self._error = trace, ""
        try:
            Path(trace.folder).mkdir(parents=True, exist_ok=True)
            if trace.tool == "nsight":
                torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
            else:
                self._profiler = _started()
        except (OSError, RuntimeError) as error:
            self._error = one_line(error)

    def stop(self) -> Traced:
        """Stop recording and write the file; return an empty part if this rank records nothing."""
        trace, self._trace = self._trace, None
        if trace is None or self._error:
            return Traced(error=self._error)
        try:
            if trace.tool == "nsight":
                torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
                return Traced()
            return self._written(trace)
        except (OSError, RuntimeError) as error:
            return Traced(error=one_line(error))

    def _written(self, trace: StepTrace) -> Traced:
        profiler, self._profiler = self._profiler, None
        assert profiler is not None, "set by start"
        profiler.stop()
        name = trace.file(self._rank)
        profiler.export_chrome_trace(str(Path(trace.folder) / name))
        recorded = profiler.events() or []  # type: ignore[no-untyped-call]
        events = [(e.name.lower(), float(e.time_range.start), float(e.time_range.end)) for e in recorded]
        return Traced(name, communication(events))


def _started() -> torch.profiler.profile:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    profiler = torch.profiler.profile(activities=activities)
    profiler.start()
    return profiler


def communication(events: Iterable[tuple[str, float, float]]) -> dict[str, float]:
    """Return the figures of a trace. events: (name, start, end) in microseconds.

    profile/communication_share: time in which any collective ran / total time.
    profile/all_gather_ms, profile/gradient_sync_ms: mean duration of one gather, and of one reduction.
    """
    every = list(events)
    if not every:
        return {}
    collectives = [event for event in every if event[0].startswith(_COLLECTIVES)]
    whole = max(end for _, _, end in every) - min(start for _, start, _ in every)
    figures = {"profile/communication_share": _covered([(s, e) for _, s, e in collectives]) / whole}
    for name, words in (("all_gather", _ALL_GATHER), ("gradient_sync", _GRADIENTS)):
        times = [end - start for event, start, end in collectives if any(word in event for word in words)]
        if times:
            figures[f"profile/{name}_ms"] = sum(times) / len(times) / 1000
    return figures


def _covered(spans: list[tuple[float, float]]) -> float:
    """Return the length of the union of spans; collectives on several streams overlap."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
