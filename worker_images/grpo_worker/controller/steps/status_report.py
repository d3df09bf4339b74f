"""Report of the loop's state in the job's status."""

from dataclasses import dataclass
from typing import Any

from grpo_worker.controller.loop_state import LoopState
from grpo_worker.controller.recovery.failures import FailureHandler
from grpo_worker.controller.status.gpu_time import GpuTime
from grpo_worker.controller.status.progress import ProgressBoard
from grpo_worker.controller.status.recovery_times import RecoveryTimes
from grpo_worker.controller.validation.validator import Validator
from grpo_worker.controller.weight_sync.synchronizer import WeightSynchronizer


@dataclass(frozen=True, slots=True)
class StatusReport:
    """Updates the status with what is derived from the state of the loop and its parts."""

    state: LoopState
    board: ProgressBoard
    failures: FailureHandler
    weights: WeightSynchronizer
    validator: Validator
    gpus: GpuTime
    recovery: RecoveryTimes

    def update(self, **changes: Any) -> None:
        """Replace fields of the status, given by their Python names, and those that are derived."""
        served = self.weights.served
        if served is not None:  # else the engines may serve the version of an earlier controller
            changes["weight_version"] = served
        self.failures.forget_nodes(self.board.get().forget_nodes)
        changes |= self.failures.counts() | self.gpus.report()
        changes["last_recovery"] = self.recovery.last
        changes["validation"] = self.validator.results
        self.board.update(step=self.state.step, attempt=self.failures.record.attempt, **changes)

    def show(self, message: str) -> None:
        """Show what the job does or waits for."""
        self.update(message=message)
