"""Saving of the finished steps when they would be lost otherwise, and before the job pauses or ends."""

import logging
from dataclasses import dataclass

from grpo_worker.checkpointing.attempts import SupersededError
from grpo_worker.common.clock import Clock
from grpo_worker.controller.loop_state import LoopState
from grpo_worker.controller.recovery.attempt_end import Failure, failure_of
from grpo_worker.controller.recovery.checkpoints import RunCheckpoints
from grpo_worker.controller.recovery.departure import LeavingError
from grpo_worker.controller.weight_sync.synchronizer import WeightSynchronizer
from grpo_worker.metrics.timing import StepTimer
from grpo_worker.rollout.batch_file import RolloutBatch

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepSaver:
    """Saves a checkpoint of the finished steps, whose background work has to end first."""

    state: LoopState
    checkpoints: RunCheckpoints
    weights: WeightSynchronizer
    clock: Clock

    def poll(self) -> None:
        """Note the checkpoint of an earlier step if it is complete, and the records that must precede it."""
        if self.state.background.done:
            self.state.background.finish()
            self.checkpoints.poll()

    def save_now(self) -> None:
        """Save a checkpoint of this step, unless it exists, and wait until it is complete."""
        self.weights.before_training(StepTimer(self.clock))
        self.state.background.finish()
        self.checkpoints.save_now(self.state.step)

    def save_parked(self, rollouts: RolloutBatch | None = None) -> None:
        """Save a checkpoint, so that no step is lost if the trainers go too while they wait for engines.

        ``rollouts``: samples of the next step, if it has begun. Samples that are still generated ahead are
        not in it; after a restore newer weights generate them.
        """
        self.weights.forget_engines()
        if self.state.step != self.checkpoints.stored:
            self.state.background.finish()
            self.checkpoints.save_parked(self.state.step, rollouts, self.state.spec.shares_gpus)

    def save_leaving(self, leaving: LeavingError) -> Failure:
        """Save the finished steps, unless they are saved, before pods of the job end; return why it ends."""
        step = self.state.step
        log.warning("%s: step %d is to be saved", leaving, step)
        try:
            self.save_parked()
        except SupersededError:
            raise
        except Exception as error:  # noqa: BLE001 - the attempt ends in any case
            reason = failure_of(error, self.state.spec.checkpoint.store.label).message
            saved = f"step {step} was not saved: {reason}"
        else:
            stored = self.checkpoints.stored
            saved = f"the checkpoint of step {stored} is complete" if stored else "there is nothing to save"
        return Failure(f"{leaving}; {saved}", "infrastructure", False)
