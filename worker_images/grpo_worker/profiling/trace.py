"""Traces of some training steps on some ranks, for Perfetto or chrome://tracing."""

from pathlib import Path

import torch

from grpo_operator.api.grpojob import ProfileSpec


class StepTrace:
    """Records from the beginning of ``stepStart`` to the end of ``stepEnd`` on the chosen ranks."""

    def __init__(self, spec: ProfileSpec | None, rank: int, directory: Path) -> None:
        self._spec = spec if spec is not None and rank in spec.ranks else None
        self._rank = rank
        self._directory = directory
        self._profiler: torch.profiler.profile | None = None

    def begin(self, step: int) -> None:
        """A step's computing begins."""
        if self._spec is None or step != self._spec.step_start or self._profiler is not None:
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities)
        self._profiler.start()

    def end(self, step: int) -> None:
        """A step's computing is done; the trace is written after the last one."""
        if self._spec is None or self._profiler is None or step < self._spec.step_end:
            return
        self._profiler.stop()
        self._directory.mkdir(parents=True, exist_ok=True)
        steps = f"{self._spec.step_start}-{self._spec.step_end}"
        self._profiler.export_chrome_trace(str(self._directory / f"steps-{steps}-rank-{self._rank}.json"))
        self._profiler = None
