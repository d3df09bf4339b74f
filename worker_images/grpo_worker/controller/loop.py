"""The GRPO loop: generate, score, train, push the weights, save checkpoints."""

import logging
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from typing import Any

from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.status import Phase
from grpo_worker.checkpointing.attempts import SupersededError
from grpo_worker.checkpointing.fork import DATA, data_of
from grpo_worker.common.clock import SYSTEM_CLOCK, Clock, utc_time
from grpo_worker.common.log_lines import LABELS
from grpo_worker.common.ragged_batch import RaggedBatch
from grpo_worker.common.store_path import JobFolder
from grpo_worker.controller.generation.sample_ledger import SampleLedger
from grpo_worker.controller.generation.scheduler import scheduler_of
from grpo_worker.controller.generation.step_sampler import StepSampler
from grpo_worker.controller.inputs import Inputs
from grpo_worker.controller.profiles.step_traces import StepTraces
from grpo_worker.controller.recovery.attempt_end import Failure, failure_of
from grpo_worker.controller.recovery.checkpoints import RunCheckpoints
from grpo_worker.controller.recovery.departure import LeavingError
from grpo_worker.controller.recovery.failures import FailureHandler
from grpo_worker.controller.recovery.parking import Parking
from grpo_worker.controller.recovery.rollback import roll_back
from grpo_worker.controller.recovery.routed_experts import RoutedExpertsLoader
from grpo_worker.controller.run_artifacts import run_artifacts
from grpo_worker.controller.status.gpu_time import GpuTime
from grpo_worker.controller.status.page_file import write_page
from grpo_worker.controller.status.progress import ProgressBoard
from grpo_worker.controller.status.recovery_times import RecoveryTimes
from grpo_worker.controller.step_records import StepRecords
from grpo_worker.controller.training.batch_trainer import BatchTrainer
from grpo_worker.controller.training.gang import Restored, TrainerGang
from grpo_worker.controller.training.image_versions import check_pool
from grpo_worker.controller.validation.divergence import DivergenceWatch
from grpo_worker.controller.validation.setback import SetbackError
from grpo_worker.controller.validation.validator import validator_of
from grpo_worker.controller.weight_sync.synchronizer import PushResult, WeightSynchronizer
from grpo_worker.metrics.generation import refused_message
from grpo_worker.metrics.gpu_time import Use
from grpo_worker.metrics.recovery import Part
from grpo_worker.metrics.step import step_metrics
from grpo_worker.metrics.timing import StepTimer
from grpo_worker.rollout.batch_file import RolloutBatch
from grpo_worker.rollout.client import RolloutClient
from grpo_worker.rollout.engine_pool import RolloutPool
from grpo_worker.run_page.records import step_records
from grpo_worker.run_page.snapshot import Run
from grpo_worker.samples.writer import SampleWriter
from grpo_worker.weightsync.protocol.version import Version

log = logging.getLogger(__name__)
_UNSAVED = 120.0  # seconds for ranks to start and save steps in the pods' memory before a suspension
_LAST_RECORDS = 10.0  # seconds for the last step's record, which the page of a failed job shows


class GrpoLoop:
    """Runs a job to its end, through restarts of the training gang.

    One attempt is the life of one gang. Each step makes the next weight version, so the version of the
    trainers' weights is the number of finished steps. A lack of engines ends no attempt: see Parking.
    """

    def __init__(
        self, spec: GRPOJobSpec, folder: JobFolder, board: ProgressBoard, trainers: TrainerGang,
        pool: RolloutPool, client: RolloutClient, inputs: Inputs, weights: WeightSynchronizer,
        failures: FailureHandler, clock: Clock = SYSTEM_CLOCK, *, rollout_gpus: int = 1,
    ) -> None:  # fmt: skip
        """``folder``: of the job. ``inputs``: the model's files, the prompts and the reward.

        ``rollout_gpus``: of all engines.
        """
        self._departure, self._live = failures.departure, failures.live
        self._departure.watch(trainers)
        self._spec = spec
        self._clock = clock
        self._folder = folder
        self._board = board
        self._trainers = trainers
        self._pool, self._client = pool, client
        self._source = inputs.source
        self._reward = inputs.reward
        engines = 0 if spec.shares_gpus else rollout_gpus
        self._record = failures.record
        self._recovery = RecoveryTimes(folder.disk / "recoveries.jsonl", clock)
        gpus, spares = spec.trainer.world, spec.trainer.spare_nodes * spec.trainer.gpus_per_node
        self._gpus = GpuTime(
            folder.store / "gpu_time.json", gpus, engines, clock, spares=spares,
            resumed=self._record.resumed, suspends=self._recovery.discard,
        )  # fmt: skip
        if self._gpus.absent is not None:
            self._recovery.begins("controller", clock.now() - self._gpus.absent)
        sampler = StepSampler(spec, inputs.source, client, inputs.reward, self._gpus.generates)
        generate = None if spec.shares_gpus else client.generate  # not while trainers use the engines' GPUs
        self._parking = Parking(trainers, board, failures, clock, self._gpus, lambda: self._background)
        self._experts = RoutedExpertsLoader(trainers, generate, weights, inputs.reward, self._parking)
        self._scheduler = scheduler_of(spec, sampler, folder.store / "pending", self._experts.durable)
        # The samples of a later step, if they are generated already, are not waited for.
        ahead = spec.staleness.max_version_lag > 0
        check = (lambda: None) if ahead else self._departure.check
        self._training = BatchTrainer(spec, trainers, pool.table.suspect, check)
        self._traces = StepTraces(spec, folder.disk / "profile", board.profiles, trainers)
        self._weights = weights
        self._failures = failures
        self._ledger = SampleLedger(folder, self._record.check_claims)
        decode, wanted = inputs.model.tokenizer.decode_all, spec.observability.samples
        self._records = StepRecords(folder, spec, client, self._record.check_claims, decode, engines)
        self._samples = SampleWriter(folder, wanted, decode, self._record.check_claims, clock)
        self._page = Run(folder.disk.name, folder, spec.total_steps, decode)
        self._checkpoints = RunCheckpoints(
            spec, folder, trainers, self._scheduler, board, self._state, self._flush, self._parking,
            self._record.check_claims, inputs.fork,
        )  # fmt: skip
        self._validator = validator_of(
            spec, folder, inputs.validation, client, inputs.model,
            partial(self._gpus.generates, purpose="validation"), self._records.validated,
            self._record.check_claims,
        )  # fmt: skip
        self._divergence = DivergenceWatch(spec.divergence)
        self._step = 0
        self._background: list[Future[Any]] = []  # work of the last step, beside the next one
        self._initial_state = self._state()
        self._down: float | None = clock.now()  # since when no ranks train; None: they do

    def run(self) -> None:
        """Train until ``totalSteps`` are done, the job has failed, or another controller has taken over."""
        try:
            self._run()
        except SupersededError as error:
            log.error("%s", error)
            self._board.update(phase=Phase.RECOVERING, message=str(error), superseded=True)
            self._trainers.stop()

    def _run(self) -> None:
        self._board.update(total_steps=self._spec.total_steps)
        while not (self._record.failed or self._departure.own):
            try:
                self._begin()
                self._down = None
                with self._departure.holding():
                    while self._lacks_steps():
                        self._suspend_if_requested()
                        self._one_step()
                    self._finish()
                return
            except SupersededError:
                raise
            except SetbackError as setback:
                self._end_attempt(self._roll_back(setback))
            except LeavingError as leaving:
                with self._departure.saving():
                    failure = self._save_leaving(leaving)
                self._end_attempt(failure)
            except Exception as error:  # noqa: BLE001 - any failure is counted and retried, within limits
                self._end_attempt(failure_of(error, self._spec.checkpoint.store.label))
        if self._record.failed:
            wait(self._background, _LAST_RECORDS)
            self._records.settle()
            self._write_page()
            self._records.end(partial(run_artifacts, self._page.folder), failed=True)
            self._board.update(
                phase=Phase.FAILED, message=self._record.failed, regressed=self._record.regressed,
                diverged=self._record.diverged, validation=self._validator.results,
            )  # fmt: skip
        else:
            self._gpus.save().result()
            self._failures.finished()  # the next controller must not count a death

    def _begin(self) -> None:
        """Start the gang, restore its state, and bring the engines to the restored weights.

        Engines may start meanwhile, and after it: the first step waits for them.
        """
        self._pool.hold()  # ends a wait of the previous attempt for engines
        previous, self._background = self._background, []
        self._suspend_without_ranks()
        self._follow_job_file()
        self._record.begin_attempt()
        self._pool.attempt = LABELS.attempt = self._record.attempt
        LABELS.step = None
        self._checkpoints.begin_attempt(self._record.attempt)
        self._report(message="waiting for the training pool", next_attempt="")
        self._recovery.enters(Part.START)
        self._trainers.acquire(self._wait_for_pods, self._failures.avoided_nodes)
        self._parking.run(lambda: self._weights.before_trainers_start(self._show))
        self._show("starting the trainers")
        self._trainers.start(self._record.attempt)
        network = self._trainers.network
        self._report(network=network.text, network_problem=network.problem)
        self._recovery.enters(Part.LOAD)
        restored = self._checkpoints.restore()
        self._record.note_restored(restored.step)  # before anything of the attempts before is overwritten
        self._report(restored={"step": restored.step, "source": restored.source})
        wait(previous)  # the results of the previous attempt are of no use any more
        self._resume(restored)
        self._training.begin_attempt(self._spec.restart_policy.stragglers)
        self._traces.begin_attempt()
        self._weights.after_trainers_start()
        self._report(message="sending the first weights", trainers=self._trainers.processes())
        self._gpus.trains(Use.SYNC)
        self._push(StepTimer(self._clock))
        warning = self._parking.run(self._check_engines, self._save_parked)
        self._recovery.enters(Part.REPLAY)
        self._report(phase=Phase.TRAINING, message=warning)

    def _resume(self, restored: Restored) -> None:
        """Continue after the restored step."""
        # If nothing was lost, the answers that are being generated are those of the next step.
        keeps = not self._spec.shares_gpus and self._parking.continues(restored.step)
        self._gpus.interrupt(keeps)
        if not keeps:
            # The scheduler comes first: generation that still runs draws prompts until it is cancelled.
            self._scheduler.restore(restored.step, restored.attempt)
            self._parking.discard()
            self._load_state(restored.controller_state or self._initial_state)
            if restored.position is not None:
                self._source.load_state_dict(restored.position)
        self._step = restored.step
        self._ledger.truncate(self._step)
        self._records.truncate(self._step)
        self._samples.truncate(self._step)
        resumed = self._record.went_on_from(self._step)
        self._validator.begin_attempt(self._step, self._record.attempt, resumed)
        self._divergence.begin_attempt(step_records(self._folder), resumed)
        self._check_divergence()

    def _lacks_steps(self) -> bool:
        """Return whether steps are missing, by the job's file as it is now."""
        self._follow_job_file()
        return self._step < self._spec.total_steps

    def _follow_job_file(self) -> None:
        """Take over what has changed in the job's file. A job that is cut short keeps the steps it has."""
        self._live.look()
        total, policy = max(self._live.total_steps, self._step), self._live.restart_policy
        if total == self._spec.total_steps and policy is self._spec.restart_policy:
            return
        self._spec = self._spec.model_copy(update={"total_steps": total, "restart_policy": policy})
        self._traces.last_step = self._validator.total_steps = total
        self._client.hang_seconds = float(policy.hang_limit)
        self._board.update(total_steps=total)
        self._trainers.follow(self._spec)

    def _check_engines(self) -> str:
        """Check that enough engines serve the attempt's first weights and fit; return a warning or ""."""
        self._weights.before_generation(StepTimer(self._clock))
        return check_pool(self._trainers, self._pool, self._step, self._weights.over_nccl)

    def _one_step(self) -> None:
        self._failures.watch.check()
        self._departure.check()
        step, timer = self._step + 1, StepTimer(self._clock)
        LABELS.step = step
        version = Version(self._step)  # generates the samples of this step
        self._report()
        self._gpus.trains(Use.WAIT)
        rollouts = self._generate(version, timer)
        self._validator.begin(version, self._source.behind_drawn())
        if self._spec.shares_gpus:
            self._wait_for_validation(timer)
        self._poll_checkpoint()
        self._gpus.trains(Use.SYNC if self._spec.shares_gpus else Use.TRAIN)
        self._parking.run(lambda: self._weights.before_training(timer), lambda: self._save_parked(rollouts))
        rollouts, shared = self._experts.load(rollouts, self._training.share, version, self._save_parked)
        shared.step = step
        self._gpus.trains(Use.TRAIN)
        if step < self._spec.total_steps:
            self._scheduler.start_next(version)
        on_policy = all(sample.version == version and not sample.spans for sample in rollouts.samples)
        scores = self._training.add_model_scores(shared, rollouts.scores, timer)
        metrics = self._traces.step(step, self._training.train, shared, scores, timer, on_policy)
        self._keep_samples(step, rollouts, scores, shared.batch)
        self._gpus.trains(Use.WAIT)
        self._wait_for_samples_ahead(step, rollouts, metrics, timer)
        self._step = step
        try:
            pushed = self._push(timer)
            self._source.consumed(rollouts.taken)
            self._gpus.trains(Use.WAIT)
            with timer.phase("save_checkpoint"):
                self._checkpoints.after_step(step, self._record.attempt)
        except LeavingError:
            self._note_trained(step, rollouts, metrics, timer)
            raise
        if self._gpus.finish_step(step):
            self._recovery.ends(step)
        seconds = timer.total()
        metrics |= self._counts()
        metrics |= self._records.generated(rollouts, seconds)
        metrics |= step_metrics(shared.batch, scores, seconds, self._trainers.world)
        self._failures.step_finished(step)
        self._count_stragglers()
        self._background.append(self._records.write(step, metrics, timer, pushed))
        self._report(
            reward_mean=metrics["critic/score/mean"],
            tokens_per_second_per_gpu=metrics["perf/throughput"], step_seconds=seconds,
            message=self._checkpoints.with_problem(refused_message(rollouts.refused)),
            stragglers=self._training.watch.stragglers, straggler_count=self._training.watch.count,
        )  # fmt: skip
        self._divergence.note(step, metrics)
        self._check_divergence()

    def _counts(self) -> dict[str, float]:
        """Return metrics that count what has happened so far, and those of the GPUs' idle time."""
        counts = {
            "data/too_long": float(self._source.too_long),
            "recovery/unread_records": float(self._record.unread),
            "recovery/checkpoint_put_off_steps": float(self._checkpoints.put_off),
            "reward/failures": float(self._reward.failures),
        }
        if self._record.rollbacks:
            counts["recovery/rollbacks"] = float(self._record.rollbacks)
        return counts | self._samples.metrics() | self._validator.metrics() | self._gpus.idle

    def _check_divergence(self) -> None:
        self._divergence.check(self._spec.total_steps, self._source.behind_drawn())

    def _keep_samples(
        self, step: int, rollouts: RolloutBatch, scores: Sequence[float], batch: RaggedBatch
    ) -> None:
        """Record on what a step has trained. ``scores``, ``batch``: see StepSamples."""
        attempt = self._record.attempt
        self._ledger.append(step, attempt, rollouts.samples, rollouts.left_out, rollouts.refused)
        self._samples.add(step, attempt, rollouts, scores, batch)
        self._records.show_samples(step, rollouts, scores, batch)

    def _count_stragglers(self) -> None:
        """Count against their nodes the ranks that have become stragglers in this step."""
        for one in self._training.watch.new:
            node = self._trainers.hosts[one.rank].node
            self._failures.count_slow(node, f"rank {one.rank} computes {one.ratio} times its peers' median")

    def _generate(self, version: Version, timer: StepTimer) -> RolloutBatch:
        """Return the samples of the next step, for which the trainers wait as long as engines need."""

        def generate() -> tuple[RolloutBatch, StepTimer]:
            own = StepTimer(self._clock)
            self._weights.before_generation(own)
            return self._scheduler.next_batch(version, own), own

        rollouts, own = self._parking.run(generate, self._save_parked, key=self._step)
        timer.seconds.update(own.seconds)
        self._checkpoints.add_samples(self._step, rollouts)
        return rollouts

    def _wait_for_samples_ahead(
        self, step: int, rollouts: RolloutBatch, metrics: dict[str, float], timer: StepTimer
    ) -> None:
        """Wait until generation allows new weights. ``metrics``: of the trained step."""

        def park() -> None:  # its weights are not pushed, but a checkpoint needs nothing of that
            self._note_trained(step, rollouts, metrics, timer)
            self._save_parked()

        try:
            self._parking.run(lambda: self._scheduler.before_push(timer), park)
            self._wait_for_validation(timer)
        except LeavingError:
            self._note_trained(step, rollouts, metrics, timer)
            raise

    def _wait_for_validation(self, timer: StepTimer) -> None:
        """Wait until no engine responds for a validation any more: its weights are about to change."""
        if self._spec.validation is None:
            return
        with timer.phase("testing"):
            self._validator.finish(self._departure.check)

    def _validate_last(self) -> None:
        """Validate the final weights, if their turn has come."""
        timer = StepTimer(self._clock)
        self._parking.run(lambda: self._weights.before_generation(timer))
        self._validator.begin(Version(self._step), self._source.behind_drawn())
        self._wait_for_validation(timer)

    def _note_trained(
        self, step: int, rollouts: RolloutBatch, metrics: dict[str, float], timer: StepTimer
    ) -> None:
        """Count a step whose weights are not pushed yet, so that a checkpoint contains it."""
        self._step = step
        self._source.trained(rollouts.taken)
        self._background.append(self._records.write(step, dict(metrics), timer))

    def _save_parked(self, rollouts: RolloutBatch | None = None) -> None:
        """Save a checkpoint, so that no step is lost if the trainers go too while they wait for engines.

        ``rollouts``: samples of the next step, if it has begun. Samples that are still generated ahead are
        not in it; after a restore newer weights generate them.
        """
        self._weights.forget_engines()
        if self._step != self._checkpoints.stored:
            self._finish_background()
            self._checkpoints.save_parked(self._step, rollouts, self._spec.shares_gpus)

    def _save_leaving(self, leaving: LeavingError) -> Failure:
        """Save the finished steps, unless they are saved, before pods of the job end; return why it ends."""
        log.warning("%s: step %d is to be saved", leaving, self._step)
        try:
            self._save_parked()
        except SupersededError:
            raise
        except Exception as error:  # noqa: BLE001 - the attempt ends in any case
            reason = failure_of(error, self._spec.checkpoint.store.label).message
            saved = f"step {self._step} was not saved: {reason}"
        else:
            stored = self._checkpoints.stored
            saved = f"the checkpoint of step {stored} is complete" if stored else "there is nothing to save"
        return Failure(f"{leaving}; {saved}", "infrastructure", False)

    def _push(self, timer: StepTimer) -> "Future[PushResult]":
        """Make the trainers' weights the version of the finished steps."""
        with timer.phase("update_weights"):
            self._finish_background()
            self._gpus.trains(Use.SYNC)
            pushed = self._weights.push(Version(self._step))
            self._background.append(pushed)
            self._parking.run(lambda: self._weights.after_push(pushed))
        return pushed

    def _finish_background(self) -> None:
        """Wait for the background work of the previous step; raise its first error."""
        background, self._background = self._background, []
        for future in background:
            future.result()

    def _poll_checkpoint(self) -> None:
        """Note the checkpoint of an earlier step if it is complete, and the records that must precede it."""
        if all(future.done() for future in self._background):
            self._finish_background()
            self._checkpoints.poll()

    def _save_now(self) -> None:
        """Save a checkpoint of this step, unless it exists, and wait until it is complete."""
        self._weights.before_training(StepTimer(self._clock))
        self._finish_background()
        self._checkpoints.save_now(self._step)

    def _flush(self) -> None:
        """Wait until ledger, metrics and samples, as far as written, are on the store; any thread."""
        self._ledger.flush()
        self._records.flush()
        self._samples.flush()
        self._validator.flush()

    def _suspend_if_requested(self) -> None:
        if not self._board.get().suspend_requested:
            return
        self._report(phase=Phase.SUSPENDING, message="saving a checkpoint")
        self._save_now()
        self._report(phase=Phase.SUSPENDED, message=f"checkpoint of step {self._step} is complete")
        self._parking.wait_until_resumed()
        self._report(phase=Phase.TRAINING, message="")

    def _suspend_without_ranks(self) -> None:
        """Suspend the job if that is requested while no ranks train, for example because no node fits them.

        What is only in the pods' memory would be lost, so its ranks get time to start first.
        """
        unsaved = _UNSAVED if self._spec.checkpoint.memory else 0.0
        began, board = self._down, self._board.get()
        if not board.suspend_requested or began is None or self._clock.now() - began < unsaved:
            return
        self._report(phase=Phase.SUSPENDED, message="no ranks run; the job resumes from its last checkpoint")
        self._parking.wait_until_resumed()
        self._gpus.stops("infrastructure")
        self._report(phase=board.phase)

    def _finish(self) -> None:
        if self._spec.validation is not None:
            self._validate_last()
        self._save_now()
        if self._spec.checkpoint.export_at_end:
            self._checkpoints.export(self._step)
        self._trainers.stop()
        self._gpus.save().result()
        self._write_page()  # the pods may be deleted after the report
        self._records.end(partial(run_artifacts, self._page.folder))
        self._failures.finished()
        self._report(phase=Phase.SUCCEEDED, message=f"{self._step} steps done", trainers=[])

    def _write_page(self) -> None:
        write_page(replace(self._page, total_steps=self._spec.total_steps), self._record.check_claims)

    def _end_attempt(self, failure: Failure) -> None:
        """Count the failure, stop the whole gang, and wait for the back-off before the next attempt."""
        message, seconds = failure.message[:500], 0.0
        self._down = self._clock.now() if self._down is None else self._down
        self._gpus.stops(failure.cause)
        self._recovery.begins(failure.cause, failure.since, message)
        if failure.final:
            self._failures.end(failure.message, failure.regressed, failure.diverged)
        else:
            reported = {"message": message}
            if failure.cause != "rollback":
                log.warning(
                    "attempt %d failed (%s): %s", self._record.attempt, failure.cause, failure.message
                )
                # The end of this controller in time is no failure, and nobody waits for the next attempt.
                leaves = self._departure.own
                node = failure.host.node if failure.host else ""
                counted = failure.message, failure.cause, self._step + 1, node
                seconds = 0.0 if leaves else self._failures.count(*counted)
                later = utc_time(seconds) if seconds else ""
                reported |= {"last_failure": message, "next_attempt": later}
            self._report(
                phase=Phase.RECOVERING, waiting="", trainers=[], stragglers=[], straggler_count=0, **reported
            )
        self._trainers.stop()
        self._recovery.enters(Part.START)
        if not self._record.failed:
            self._clock.sleep(seconds)

    def _roll_back(self, setback: SetbackError) -> Failure:
        """Roll the job back, or end it; return how the attempt ends.

        If a checkpoint that is being written, or anything else, fails meanwhile, the next attempt decides.
        """
        try:
            self._finish_background()
            self._checkpoints.settle()
            return roll_back(setback, self._record, self._checkpoints.complete_steps)
        except SupersededError:
            raise
        except Exception as error:  # noqa: BLE001 - like any other failure
            return failure_of(error, self._spec.checkpoint.store.label)

    def _state(self) -> dict[str, Any]:
        """Return the controller's state for a checkpoint."""
        kl, source = self._training.kl.state_dict(), self._source.state_dict()
        return {"step": self._step, "kl": kl, "source": source, DATA: data_of(self._spec)}

    def _load_state(self, state: dict[str, Any]) -> None:
        self._training.kl.load_state_dict(state["kl"])
        # Another job's position is left out if it is one in other data.
        self._source.load_state_dict(state.get("source") or self._initial_state["source"])

    def _show(self, message: str) -> None:
        self._report(message=message)

    def _wait_for_pods(self, message: str) -> None:
        self._show(message)
        self._suspend_without_ranks()

    def _report(self, **changes: Any) -> None:
        """Update the status: ``changes``, and what is derived from the state of the loop."""
        served = self._weights.served
        if served is not None:  # else the engines may serve the version of an earlier controller
            changes["weight_version"] = served
        self._failures.forget_nodes(self._board.get().forget_nodes)
        changes |= self._failures.counts() | self._gpus.report()
        changes["last_recovery"] = self._recovery.last
        changes["validation"] = self._validator.results
        self._board.update(step=self._step, attempt=self._record.attempt, **changes)
