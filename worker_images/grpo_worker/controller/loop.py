"""The GRPO loop: attempts of a job, from the start of a training gang to its end."""

import logging
from concurrent.futures import wait
from dataclasses import dataclass, replace
from functools import partial

from grpo_operator.api.v1alpha1.status import Phase
from grpo_worker.checkpointing.attempts import SupersededError
from grpo_worker.common.clock import Clock, utc_time
from grpo_worker.common.log_lines import LABELS
from grpo_worker.controller.generation.scheduler import RolloutScheduler
from grpo_worker.controller.loop_state import LoopState
from grpo_worker.controller.profiles.step_traces import StepTraces
from grpo_worker.controller.recovery.attempt_end import Failure, failure_of
from grpo_worker.controller.recovery.checkpoints import RunCheckpoints
from grpo_worker.controller.recovery.controller_state import ControllerState
from grpo_worker.controller.recovery.departure import LeavingError
from grpo_worker.controller.recovery.failures import FailureHandler
from grpo_worker.controller.recovery.parking import Parking
from grpo_worker.controller.recovery.rollback import roll_back
from grpo_worker.controller.recovery.step_saver import StepSaver
from grpo_worker.controller.recovery.suspension import Suspension
from grpo_worker.controller.run_artifacts import run_artifacts
from grpo_worker.controller.status.gpu_time import GpuTime
from grpo_worker.controller.status.page_file import write_page
from grpo_worker.controller.status.progress import ProgressBoard
from grpo_worker.controller.status.recovery_times import RecoveryTimes
from grpo_worker.controller.steps.engine_work import EngineWork
from grpo_worker.controller.steps.live_spec import LiveSpec
from grpo_worker.controller.steps.status_report import StatusReport
from grpo_worker.controller.steps.step_files import StepFiles
from grpo_worker.controller.steps.step_outcome import StepOutcome
from grpo_worker.controller.steps.step_runner import StepRunner
from grpo_worker.controller.training.batch_trainer import BatchTrainer
from grpo_worker.controller.training.gang import Restored, TrainerGang
from grpo_worker.controller.training.image_versions import check_pool
from grpo_worker.controller.validation.setback import SetbackError
from grpo_worker.controller.validation.validator import Validator
from grpo_worker.controller.weight_sync.synchronizer import WeightSynchronizer
from grpo_worker.metrics.gpu_time import Use
from grpo_worker.metrics.recovery import Part
from grpo_worker.metrics.timing import StepTimer
from grpo_worker.rollout.engine_pool import RolloutPool
from grpo_worker.run_page.records import step_records
from grpo_worker.run_page.snapshot import Run

log = logging.getLogger(__name__)
_LAST_RECORDS = 10.0  # seconds for the last step's record, which the page of a failed job shows


@dataclass(frozen=True, slots=True)
class GrpoLoop:
    """Runs a job to its end, through restarts of the training gang.

    One attempt is the life of one gang. Each step makes the next weight version, so the version of the
    trainers' weights is the number of finished steps. A lack of engines ends no attempt: see Parking.
    ``loop_of`` connects the parts.
    """

    state: LoopState
    board: ProgressBoard
    trainers: TrainerGang
    pool: RolloutPool
    weights: WeightSynchronizer
    failures: FailureHandler
    gpus: GpuTime
    recovery: RecoveryTimes
    parking: Parking
    scheduler: RolloutScheduler
    training: BatchTrainer
    traces: StepTraces
    controller_state: ControllerState
    files: StepFiles
    validator: Validator
    checkpoints: RunCheckpoints
    report: StatusReport
    saver: StepSaver
    suspension: Suspension
    live_spec: LiveSpec
    engines: EngineWork
    outcome: StepOutcome
    steps: StepRunner
    page: Run
    clock: Clock

    def run(self) -> None:
        """Train until ``totalSteps`` are done, the job has failed, or another controller has taken over."""
        try:
            self._run()
        except SupersededError as error:
            log.error("%s", error)
            self.board.update(phase=Phase.RECOVERING, message=str(error), superseded=True)
            self.trainers.stop()

    def _run(self) -> None:
        self.board.update(total_steps=self.state.spec.total_steps)
        while not (self.failures.record.failed or self.failures.departure.own):
            try:
                self._begin()
                self.suspension.ranks_train()
                with self.failures.departure.holding():
                    while self.live_spec.lacks_steps():
                        self.suspension.between_steps()
                        self.steps.run()
                    self._finish()
                return
            except SupersededError:
                raise
            except SetbackError as setback:
                self._end_attempt(self._roll_back(setback))
            except LeavingError as leaving:
                with self.failures.departure.saving():
                    failure = self.saver.save_leaving(leaving)
                self._end_attempt(failure)
            except Exception as error:  # noqa: BLE001 - any failure is counted and retried, within limits
                self._end_attempt(failure_of(error, self.state.spec.checkpoint.store.label))
        if self.failures.record.failed:
            self._fail()
        else:
            self.gpus.save().result()
            self.failures.finished()  # the next controller must not count a death

    def _begin(self) -> None:
        """Start the gang, restore its state, and bring the engines to the restored weights.

        Engines may start meanwhile, and after it: the first step waits for them.
        """
        record = self.failures.record
        self.pool.hold()  # ends a wait of the previous attempt for engines
        previous = self.state.background.take()
        self.suspension.without_ranks()
        self.live_spec.follow()
        record.begin_attempt()
        self.pool.attempt = LABELS.attempt = record.attempt
        LABELS.step = None
        self.checkpoints.begin_attempt(record.attempt)
        self.report.update(message="waiting for the training pool", next_attempt="")
        self.recovery.enters(Part.START)
        self.trainers.acquire(self._wait_for_pods, self.failures.avoided_nodes)
        self.parking.run(lambda: self.weights.before_trainers_start(self.report.show))
        self.report.show("starting the trainers")
        self.trainers.start(record.attempt)
        network = self.trainers.network
        self.report.update(network=network.text, network_problem=network.problem)
        self.recovery.enters(Part.LOAD)
        restored = self.checkpoints.restore()
        record.note_restored(restored.step)  # before anything of the attempts before is overwritten
        self.report.update(restored={"step": restored.step, "source": restored.source})
        wait(previous)  # the results of the previous attempt are of no use any more
        self._resume(restored)
        self.training.begin_attempt(self.state.spec.restart_policy.stragglers)
        self.traces.begin_attempt()
        self.weights.after_trainers_start()
        self.report.update(message="sending the first weights", trainers=self.trainers.processes())
        self.gpus.trains(Use.SYNC)
        self.engines.push(StepTimer(self.clock))
        warning = self.parking.run(self._check_engines, self.saver.save_parked)
        self.recovery.enters(Part.REPLAY)
        self.report.update(phase=Phase.TRAINING, message=warning)

    def _wait_for_pods(self, message: str) -> None:
        self.report.show(message)
        self.suspension.without_ranks()

    def _resume(self, restored: Restored) -> None:
        """Continue after the restored step."""
        # If nothing was lost, the answers that are being generated are those of the next step.
        keeps = not self.state.spec.shares_gpus and self.parking.continues(restored.step)
        self.gpus.interrupt(keeps)
        if not keeps:
            # The scheduler comes first: generation that still runs draws prompts until it is cancelled.
            self.scheduler.restore(restored.step, restored.attempt)
            self.parking.discard()
            self.controller_state.restore(restored.controller_state, restored.position)
        self.state.step = restored.step
        self.files.truncate(restored.step)
        resumed = self.failures.record.went_on_from(restored.step)
        self.validator.begin_attempt(restored.step, self.failures.record.attempt, resumed)
        self.outcome.begin_attempt(step_records(self.page.folder), resumed)

    def _check_engines(self) -> str:
        """Check that enough engines serve the attempt's first weights and fit; return a warning or ""."""
        self.weights.before_generation(StepTimer(self.clock))
        return check_pool(self.trainers, self.pool, self.state.step, self.weights.over_nccl)

    def _finish(self) -> None:
        self.engines.validate_last()
        self.saver.save_now()
        if self.state.spec.checkpoint.export_at_end:
            self.checkpoints.export(self.state.step)
        self.trainers.stop()
        self.gpus.save().result()
        self._write_page()  # the pods may be deleted after the report
        self.files.records.end(partial(run_artifacts, self.page.folder))
        self.failures.finished()
        self.report.update(phase=Phase.SUCCEEDED, message=f"{self.state.step} steps done", trainers=[])

    def _fail(self) -> None:
        """Complete the records and the page of a job that has failed, and report why."""
        record = self.failures.record
        wait(self.state.background.futures(), _LAST_RECORDS)
        self.files.records.settle()
        self._write_page()
        self.files.records.end(partial(run_artifacts, self.page.folder), failed=True)
        self.board.update(
            phase=Phase.FAILED, message=record.failed, regressed=record.regressed, diverged=record.diverged,
            validation=self.validator.results,
        )  # fmt: skip

    def _write_page(self) -> None:
        page = replace(self.page, total_steps=self.state.spec.total_steps)
        write_page(page, self.failures.record.check_claims)

    def _end_attempt(self, failure: Failure) -> None:
        """Count the failure, stop the whole gang, and wait for the back-off before the next attempt."""
        message, seconds = failure.message[:500], 0.0
        self.suspension.ranks_ended()
        self.gpus.stops(failure.cause)
        self.recovery.begins(failure.cause, failure.since, message)
        if failure.final:
            self.failures.end(failure.message, failure.regressed, failure.diverged)
        else:
            reported = {"message": message}
            if failure.cause != "rollback":
                attempt = self.failures.record.attempt
                log.warning("attempt %d failed (%s): %s", attempt, failure.cause, failure.message)
                # The end of this controller in time is no failure, and nobody waits for the next attempt.
                leaves = self.failures.departure.own
                node = failure.host.node if failure.host else ""
                counted = failure.message, failure.cause, self.state.step + 1, node
                seconds = 0.0 if leaves else self.failures.count(*counted)
                later = utc_time(seconds) if seconds else ""
                reported |= {"last_failure": message, "next_attempt": later}
            self.report.update(
                phase=Phase.RECOVERING, waiting="", trainers=[], stragglers=[], straggler_count=0, **reported
            )
        self.trainers.stop()
        self.recovery.enters(Part.START)
        if not self.failures.record.failed:
            self.clock.sleep(seconds)

    def _roll_back(self, setback: SetbackError) -> Failure:
        """Roll the job back, or end it; return how the attempt ends.

        If a checkpoint that is being written, or anything else, fails meanwhile, the next attempt decides.
        """
        try:
            self.state.background.finish()
            self.checkpoints.settle()
            return roll_back(setback, self.failures.record, self.checkpoints.complete_steps)
        except SupersededError:
            raise
        except Exception as error:  # noqa: BLE001 - like any other failure
            return failure_of(error, self.state.spec.checkpoint.store.label)
