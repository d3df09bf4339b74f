"""Work of the engines for the steps: generation, new weights and validations."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from grpo_worker.common.clock import Clock
from grpo_worker.controller.generation.scheduler import RolloutScheduler
from grpo_worker.controller.loop_state import LoopState
from grpo_worker.controller.recovery.checkpoints import RunCheckpoints
from grpo_worker.controller.recovery.departure import Departure
from grpo_worker.controller.recovery.parking import Parking
from grpo_worker.controller.recovery.step_saver import StepSaver
from grpo_worker.controller.status.gpu_time import GpuTime
from grpo_worker.controller.validation.validator import Validator
from grpo_worker.controller.weight_sync.synchronizer import PushResult, WeightSynchronizer
from grpo_worker.data.prompts import PromptSource
from grpo_worker.metrics.gpu_time import Use
from grpo_worker.metrics.timing import StepTimer
from grpo_worker.rollout.batch_file import RolloutBatch
from grpo_worker.weightsync.protocol.version import Version


@dataclass(frozen=True, slots=True)
class EngineWork:
    """Has the engines do their part of a step.

    The trainers wait for it as long as engines need, and are parked while too few serve: see Parking.
    """

    state: LoopState
    source: PromptSource
    scheduler: RolloutScheduler
    weights: WeightSynchronizer
    validator: Validator
    parking: Parking
    departure: Departure
    checkpoints: RunCheckpoints
    saver: StepSaver
    gpus: GpuTime
    clock: Clock

    def generate(self, version: Version, timer: StepTimer) -> RolloutBatch:
        """Return the samples of the next step."""

        def generate() -> tuple[RolloutBatch, StepTimer]:
            own = StepTimer(self.clock)
            self.weights.before_generation(own)
            return self.scheduler.next_batch(version, own), own

        rollouts, own = self.parking.run(generate, self.saver.save_parked, key=self.state.step)
        timer.seconds.update(own.seconds)
        self.checkpoints.add_samples(self.state.step, rollouts)
        return rollouts

    def before_training(self, rollouts: RolloutBatch, timer: StepTimer) -> None:
        """Make the GPUs ready for the trainers. ``rollouts``: of the step."""
        self.parking.run(
            lambda: self.weights.before_training(timer), lambda: self.saver.save_parked(rollouts)
        )

    def start_next(self, step: int, version: Version) -> None:
        """Start to generate the samples of the step after ``step``, unless that is the last, if allowed."""
        if step < self.state.spec.total_steps:
            self.scheduler.start_next(version)

    def before_push(self, timer: StepTimer, park: Callable[[], None]) -> None:
        """Wait until engines may get new weights. ``park``: called when the trainers are parked."""
        self.parking.run(lambda: self.scheduler.before_push(timer), park)
        self.finish_validation(timer)

    def push(self, timer: StepTimer) -> "Future[PushResult]":
        """Make the trainers' weights the version of the finished steps."""
        with timer.phase("update_weights"):
            self.state.background.finish()
            self.gpus.trains(Use.SYNC)
            pushed = self.weights.push(self.state.version)
            self.state.background.add(pushed)
            self.parking.run(lambda: self.weights.after_push(pushed))
        return pushed

    def begin_validation(self, version: Version) -> None:
        """Start to validate ``version``, which engines serve, if its turn has come."""
        self.validator.begin(version, self.source.behind_drawn())

    def finish_validation(self, timer: StepTimer) -> None:
        """Wait until no engine responds for a validation any more: its weights are about to change."""
        if self.state.spec.validation is None:
            return
        with timer.phase("testing"):
            self.validator.finish(self.departure.check)

    def validate_last(self) -> None:
        """Validate the final weights, if the job has validations and their turn has come."""
        if self.state.spec.validation is None:
            return
        timer = StepTimer(self.clock)
        self.parking.run(lambda: self.weights.before_generation(timer))
        self.begin_validation(self.state.version)
        self.finish_validation(timer)
