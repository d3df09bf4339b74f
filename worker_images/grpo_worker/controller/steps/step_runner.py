"""One step of the training loop: generate, train, push the weights, save a checkpoint when it is due."""

from concurrent.futures import Future
from dataclasses import dataclass

from grpo_worker.common.clock import Clock
from grpo_worker.common.log_lines import LABELS
from grpo_worker.controller.loop_state import LoopState
from grpo_worker.controller.profiles.step_traces import StepTraces
from grpo_worker.controller.recovery.checkpoints import RunCheckpoints
from grpo_worker.controller.recovery.departure import LeavingError
from grpo_worker.controller.recovery.failures import FailureHandler
from grpo_worker.controller.recovery.routed_experts import RoutedExpertsLoader
from grpo_worker.controller.recovery.step_saver import StepSaver
from grpo_worker.controller.status.gpu_time import GpuTime
from grpo_worker.controller.status.recovery_times import RecoveryTimes
from grpo_worker.controller.steps.engine_work import EngineWork
from grpo_worker.controller.steps.status_report import StatusReport
from grpo_worker.controller.steps.step_outcome import StepOutcome, TrainedStep
from grpo_worker.controller.training.batch_trainer import BatchTrainer
from grpo_worker.controller.weight_sync.synchronizer import PushResult
from grpo_worker.data.prompts import PromptSource
from grpo_worker.metrics.gpu_time import Use
from grpo_worker.metrics.timing import StepTimer
from grpo_worker.rollout.batch_file import RolloutBatch
from grpo_worker.weightsync.protocol.version import Version


@dataclass(frozen=True, slots=True)
class StepRunner:
    """Runs the steps of an attempt, one at a time.

    The order of its calls decides what a crash between two of them loses, and that a replay is exact.
    """

    state: LoopState
    source: PromptSource
    engines: EngineWork
    experts: RoutedExpertsLoader
    training: BatchTrainer
    traces: StepTraces
    checkpoints: RunCheckpoints
    saver: StepSaver
    failures: FailureHandler
    gpus: GpuTime
    recovery: RecoveryTimes
    outcome: StepOutcome
    report: StatusReport
    clock: Clock

    def run(self) -> None:
        """Run the next step. Any error ends the attempt."""
        self.failures.watch.check()
        self.failures.departure.check()
        step, timer = self.state.step + 1, StepTimer(self.clock)
        LABELS.step = step
        version = self.state.version  # generates the samples of this step
        self.report.update()
        rollouts = self._generate(version, timer)
        trained = self._train(step, rollouts, version, timer)
        self.outcome.keep_samples(trained)
        self.gpus.trains(Use.WAIT)
        self._wait_for_samples_ahead(trained)
        self.state.step = step
        pushed = self._push_and_save(trained)
        if self.gpus.finish_step(step):
            self.recovery.ends(step)
        self.outcome.note_finished(trained, pushed)

    def _generate(self, version: Version, timer: StepTimer) -> RolloutBatch:
        """Return the samples of the step; the engines then hold no GPUs that the trainers need."""
        shares_gpus = self.state.spec.shares_gpus
        self.gpus.trains(Use.WAIT)
        rollouts = self.engines.generate(version, timer)
        self.engines.begin_validation(version)
        if shares_gpus:
            self.engines.finish_validation(timer)
        self.saver.poll()
        self.gpus.trains(Use.SYNC if shares_gpus else Use.TRAIN)
        self.engines.before_training(rollouts, timer)
        return rollouts

    def _train(self, step: int, rollouts: RolloutBatch, version: Version, timer: StepTimer) -> TrainedStep:
        """Train on the samples, while engines may generate those of the next step."""
        rollouts, shared = self.experts.load(rollouts, self.training.share, version, self.saver.save_parked)
        shared.step = step
        self.gpus.trains(Use.TRAIN)
        self.engines.start_next(step, version)
        on_policy = all(sample.version == version and not sample.spans for sample in rollouts.samples)
        scores = self.training.add_model_scores(shared, rollouts.scores, timer)
        metrics = self.traces.step(step, self.training.train, shared, scores, timer, on_policy)
        return TrainedStep(step, rollouts, scores, shared.batch, metrics, timer)

    def _wait_for_samples_ahead(self, trained: TrainedStep) -> None:
        """Wait until generation allows new weights."""

        def park() -> None:  # its weights are not pushed, but a checkpoint needs nothing of that
            self.outcome.note_trained(trained)
            self.saver.save_parked()

        try:
            self.engines.before_push(trained.timer, park)
        except LeavingError:
            self.outcome.note_trained(trained)
            raise

    def _push_and_save(self, trained: TrainedStep) -> "Future[PushResult]":
        """Push the weights, and start the checkpoints that are due; return the end of the push."""
        try:
            pushed = self.engines.push(trained.timer)
            self.source.consumed(trained.rollouts.taken)
            self.gpus.trains(Use.WAIT)
            with trained.timer.phase("save_checkpoint"):
                self.checkpoints.after_step(trained.step, self.failures.record.attempt)
        except LeavingError:
            self.outcome.note_trained(trained)
            raise
        return pushed
