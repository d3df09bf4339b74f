"""Progress board that also records what the controller reports, and when."""

from collections.abc import Callable
from typing import Any

from grpo_operator.api.v1alpha1.status import Phase
from grpo_rehearsal.virtual.scheduler import Scheduler
from grpo_worker.controller.status.progress import ProgressBoard


class RecordingBoard(ProgressBoard):
    """The controller's status. ``history``: (time, field, value) of changes of phase, message, step, ..."""

    def __init__(self, scheduler: Scheduler, at_training: Callable[[], None]) -> None:
        """``at_training``: called when the job begins to train for the first time."""
        super().__init__()
        self.history: list[tuple[float, str, Any]] = []
        self.training_since: float | None = None
        self._scheduler = scheduler
        self._at_training = at_training

    def update(self, **changes: Any) -> None:
        """Replace fields of the status, and record the changed ones."""
        before = self.get()
        super().update(**changes)
        after = self.get()
        for name in ("phase", "message", "step", "weight_version", "attempt", "last_checkpoint", "restored"):
            value = getattr(after, name)
            if value != getattr(before, name):
                self.history.append((self._scheduler.now, name, value))
        if after.phase is Phase.TRAINING and self.training_since is None:
            self.training_since = self._scheduler.now
            self._at_training()
