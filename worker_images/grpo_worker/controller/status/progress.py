"""What the controller tells the operator, updated by the loop and served over HTTP."""

import threading
from dataclasses import dataclass, field, replace
from typing import Any

from grpo_operator.api.v1alpha1.status import Phase


@dataclass(frozen=True, slots=True)
class Progress:
    """One consistent picture of the run."""

    phase: Phase = Phase.STARTING
    message: str = ""
    step: int = 0
    total_steps: int = 0
    weight_version: int | None = None
    reward_mean: float | None = None
    tokens_per_second_per_gpu: float | None = None
    last_checkpoint: int | None = None
    checkpoint_location: str = ""
    restored: dict[str, Any] = field(default_factory=dict)  # step and source that this attempt began with
    attempt: int = 0
    restarts: dict[str, int] = field(default_factory=lambda: {"job": 0, "infrastructure": 0})
    suspend_requested: bool = False
    trainers: list[dict[str, Any]] = field(default_factory=list)
    tokens: dict[str, Any] | None = None  # TokensStatus
    data: dict[str, Any] | None = None  # DataStatus


class ProgressBoard:
    """Thread-safe holder of the latest Progress and of the wish to suspend."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._progress = Progress()

    def get(self) -> Progress:
        with self._lock:
            return self._progress

    def update(self, **changes: Any) -> None:
        with self._lock:
            self._progress = replace(self._progress, **changes)

    def request_suspend(self, wanted: bool) -> None:
        """Set or clear the wish; the loop heeds it between two steps."""
        with self._lock:
            self._progress = replace(self._progress, suspend_requested=wanted)
            self._lock.notify_all()

    def wait_until_resumed(self) -> None:
        with self._lock:
            self._lock.wait_for(lambda: not self._progress.suspend_requested)
