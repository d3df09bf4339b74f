"""Traces of some training steps on some ranks: for Perfetto by torch's profiler, or by Nsight Systems."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from grpo_operator.api.v1alpha1.observability import ProfileSpec

_COLLECTIVES = ("nccl", "gloo:")  # how names of kernels, or of gloo's work, begin
_ALL_GATHER = ("allgather", "all_gather")
_GRADIENTS = ("reducescatter", "reduce_scatter", "allreduce", "all_reduce")
_NSIGHT = {
    "t": "cuda,cudnn,cublas,nvtx",
    "capture-range": "cudaProfilerApi",
    "capture-range-end": "stop-shutdown",
    "kill": "none",
}


def runtime_env(spec: ProfileSpec | None, folder: str) -> dict[str, Any]:
    """What Ray must start the ranks under. Ranks get their numbers later, so all run under nsys;
    those that never begin a capture write nothing."""
    if spec is None or spec.tool != "nsight":
        return {}
    return {"nsight": {**_NSIGHT, "o": f"{folder}/nsight-%h-%p"}}


class StepTrace:
    """Records from the beginning of ``stepStart`` to the end of ``stepEnd`` on the chosen ranks."""

    def __init__(self, spec: ProfileSpec | None, rank: int, directory: Path) -> None:
        self._spec = spec if spec is not None and rank in spec.ranks else None
        self._rank = rank
        self._directory = directory
        self._capturing = False
        self._profiler: torch.profiler.profile | None = None

    def begin(self, step: int) -> None:
        """A step's computing begins."""
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
        """A step's computing is done; the trace is written after the last one, and its figures are
        returned then (see ``communication``)."""
        if self._spec is None or not self._capturing or step < self._spec.step_end:
            return {}
        self._capturing = False
        if self._profiler is None:
            torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
            return {}
        self._profiler.stop()
        steps = f"{self._spec.step_start}-{self._spec.step_end}"
        self._profiler.export_chrome_trace(str(self._directory / f"steps-{steps}-rank-{self._rank}.json"))
        found = self._profiler.events() or []  # type: ignore[no-untyped-call]
        events = [(e.name.lower(), float(e.time_range.start), float(e.time_range.end)) for e in found]
        self._profiler = None
        return communication(events)


def communication(events: Iterable[tuple[str, float, float]]) -> dict[str, float]:
    """Figures of (name, start, end) in microseconds.

    profile/communication_share: time in which some collective ran / the whole time.
    profile/all_gather_ms, profile/gradient_sync_ms: mean of one gather, of one reduction.
    """
    every = list(events)
    if not every:
        return {}
    collectives = [event for event in every if event[0].startswith(_COLLECTIVES)]
    whole = max(end for _, _, end in every) - min(start for _, start, _ in every)
    figures = {"profile/communication_share": _covered([(s, e) for _, s, e in collectives]) / whole}
    for name, words in (("all_gather", _ALL_GATHER), ("gradient_sync", _GRADIENTS)):
        times = [end - start for found, start, end in collectives if any(word in found for word in words)]
        if times:
            figures[f"profile/{name}_ms"] = sum(times) / len(times) / 1000
    return figures


def _covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of spans: collectives on several streams overlap."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
