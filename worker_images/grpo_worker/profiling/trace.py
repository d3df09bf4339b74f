"""Traces of selected training steps and ranks, by torch's profiler (for Perfetto) or Nsight Systems."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from grpo_operator.api.v1alpha1.observability import ProfileSpec

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


class StepTrace:
    """Recording from the beginning of ``stepStart`` to the end of ``stepEnd`` on the selected ranks."""

    def __init__(self, spec: ProfileSpec | None, rank: int, directory: Path) -> None:
        self._spec = spec if spec is not None and rank in spec.ranks else None
        self._rank = rank
        self._directory = directory
        self._capturing = False
        self._profiler: torch.profiler.profile | None = None

    def begin(self, step: int) -> None:
        """Start recording if ``step`` is ``stepStart``."""
        if self._spec is None or step != self._spec.step_start or self._capturing:
            return
        self._capturing = True
        self._directory.mkdir(parents=True, exist_ok=True)
        if self._spec.tool == "nsight":
            torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities)
        self._profiler.start()

    def end(self, step: int) -> dict[str, float]:
        """Write the trace if ``step`` is ``stepEnd``; return its figures then (see ``communication``)."""
        if self._spec is None or not self._capturing or step < self._spec.step_end:
            return {}
        self._capturing = False
        if self._profiler is None:
            torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
            return {}
        self._profiler.stop()
        steps = f"{self._spec.step_start}-{self._spec.step_end}"
        self._profiler.export_chrome_trace(str(self._directory / f"steps-{steps}-rank-{self._rank}.json"))
        recorded = self._profiler.events() or []  # type: ignore[no-untyped-call]
        events = [(e.name.lower(), float(e.time_range.start), float(e.time_range.end)) for e in recorded]
        self._profiler = None
        return communication(events)


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
