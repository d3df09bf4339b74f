"""The GRPO loop: generate, reward, log-probs, advantages, update, sync, checkpoint."""

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.status import Phase
from grpo_worker.checkpointing.store import directory
from grpo_worker.common.errors import one_line
from grpo_worker.controller.generation.sample_ledger import SampleLedger
from grpo_worker.controller.generation.scheduler import OneStepAhead, OnPolicy, RolloutScheduler
from grpo_worker.controller.generation.step_sampler import StepSampler
from grpo_worker.controller.recovery.failures import FailureHandler
from grpo_worker.controller.recovery.memory_tier import MemoryTier
from grpo_worker.controller.recovery.run_record import Cause, SupersededError
from grpo_worker.controller.status.progress import ProgressBoard
from grpo_worker.controller.training.batch_trainer import BatchTrainer
from grpo_worker.controller.training.gang import CALL_TIMEOUT, Restored, TrainerGang
from grpo_worker.controller.training.parity import ParityError, check_configs
from grpo_worker.controller.training.worker_group import GangError
from grpo_worker.controller.weight_sync.colocation import Turns
from grpo_worker.controller.weight_sync.synchronizer import Sent, WeightSender
from grpo_worker.data.prompts import PromptSource
from grpo_worker.metrics.sinks import sinks_of
from grpo_worker.metrics.step import step_metrics
from grpo_worker.metrics.timing import StepTimer
from grpo_worker.metrics.writer import MetricsWriter
from grpo_worker.rewards.manager import RewardManager
from grpo_worker.rewards.verifiers import RewardError
from grpo_worker.rollout.client import RolloutClient
from grpo_worker.rollout.engine_pool import RolloutPool, SyncError
from grpo_worker.rollout.sampling import UnfitEngineError
from grpo_worker.rollout.train_batch import make_batch

log = logging.getLogger(__name__)


class GrpoLoop:
    """Runs a job to its end, through restarts of the training gang."""

    def __init__(
        self, spec: GRPOJobSpec, store: Path, board: ProgressBoard, trainers: TrainerGang, pool: RolloutPool,
        client: RolloutClient, source: PromptSource, pad_id: int, reward: RewardManager,
        failures: FailureHandler,
    ) -> None:  # fmt: skip
        self._spec = spec
        self._board = board
        self._trainers = trainers
        self._pool = pool
        self._source = source
        self._pad_id = pad_id
        sampler = StepSampler(spec, source, client, reward)
        keep, every = spec.checkpoint.keep, spec.checkpoint.every_steps
        ahead = OneStepAhead(sampler, store / "pending", keep, every, spec.staleness.partial_rollouts)
        self._producer: RolloutScheduler = ahead if spec.staleness.max_version_lag else OnPolicy(sampler)
        self._reward = reward
        self._training = BatchTrainer(spec, trainers)
        self._weights = WeightSender(trainers, pool, spec)
        self._turns = Turns(spec, trainers, pool, self._weights)
        self._failures = failures
        self._record = failures.record
        self._ledger = SampleLedger(store / "ledger.jsonl")
        shown = spec.observability
        self._metrics = MetricsWriter(store, sinks_of(shown, store.name, store), shown.thresholds)
        self._store = store
        memory = spec.checkpoint.memory
        self._memory: MemoryTier | None = None
        if memory is not None:
            file = store / "memory.json"
            self._memory = MemoryTier(trainers, memory.every_steps, memory.replicas, file, CALL_TIMEOUT)
        self._step = 0
        self._saving = False  # is a checkpoint being written?
        self._pending: list[Future[Any]] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="record")
        self._initial = self._state()

    def run(self) -> None:
        """Train until ``totalSteps``, until the restarts are used up, or until another controller does."""
        try:
            self._run()
        except SupersededError as error:
            log.error("%s", error)
            self._board.update(phase=Phase.RECOVERING, message=str(error))
            self._trainers.stop()

    def _run(self) -> None:
        self._board.update(total_steps=self._spec.total_steps)
        while not self._record.failed:
            try:
                self._begin()
                while self._step < self._spec.total_steps:
                    self._heed_suspend()
                    self._one_step()
                self._finish()
                return
            except SupersededError:
                raise
            except (ParityError, RewardError, UnfitEngineError) as error:
                self._failures.end(str(error))
                self._trainers.stop()
            except GangError as error:
                # A rank whose process died is infrastructure.
                self._restart(str(error), "infrastructure" if error.lost else "job")
            except (SyncError, TimeoutError) as error:
                # The rollout pool is short of engines; the trainers are well, but the step
                # cannot go on. Start the attempt again: engines may be back by then.
                self._restart(str(error), "infrastructure")
            except Exception as error:  # whatever else goes wrong: named, counted, tried again
                log.exception("the attempt failed")
                self._restart(one_line(error), "infrastructure" if isinstance(error, OSError) else "job")
        self._board.update(phase=Phase.FAILED, message=self._record.failed)

    def _begin(self) -> None:
        """Start the gang, restore, and bring the engines to the restored weights."""
        wait(self._pending)  # of the attempt before; what became of it does not matter any more
        self._pending, self._saving = [], False
        self._record.begin_attempt()
        self._pool.attempt = self._record.attempt
        self._report(message="waiting for the training pool")
        self._trainers.acquire()
        if self._spec.shares_gpus:
            self._report(message="waiting for the engines, which start before the ranks")
        self._turns.begin_attempt()
        self._trainers.start()
        restored = self._restore()
        self._producer.restore(restored.step)  # first: what is under way still takes prompts
        self._load_state(restored.controller_state or self._initial)
        self._step = restored.step
        self._ledger.truncate(self._step)
        self._metrics.truncate(self._step)
        self._training.begin_attempt()
        self._weights.begin_attempt()
        self._report(message="sending the first weights", trainers=self._trainers.processes())
        self._sync(StepTimer())
        self._engines_turn(StepTimer())
        check_configs(self._trainers.hf, self._pool.model_configs(self._step))
        checkpoint = {"last_checkpoint": self._step} if restored.controller_state else {}
        self._report(phase=Phase.TRAINING, message="", **checkpoint)

    def _restore(self) -> Restored:
        """From the pods' memory, if that is newer than the store."""
        found = None
        if self._memory is not None:
            self._memory.begin_attempt()
            found = self._memory.restore(self._trainers.newest)
        found = found or self._trainers.restore()
        self._report(restored={"step": found.step, "source": found.source})
        return found

    def _one_step(self) -> None:
        self._record.check()
        step, timer = self._step + 1, StepTimer()
        self._engines_turn(timer)
        found = self._producer.take(self._step, timer)
        self._turns.to_trainers(timer)
        if step < self._spec.total_steps:
            self._producer.go_ahead(self._step)
        fresh = all(sample.version == self._step and not sample.spans for sample in found.samples)
        batch = make_batch(found.prompts, found.samples, self._pad_id)
        scores = self._training.judged(batch, found.scores, timer)
        metrics = self._training.train(step, batch, scores, timer, fresh)
        self._producer.settle(timer)
        self._step = step
        sent = self._sync(timer)
        self._source.consumed(found.taken)
        self._ledger.append(step, self._record.attempt, found.samples, found.left_out)
        with timer.phase("save_checkpoint"):
            self._checkpoint()
        seconds = timer.total()
        metrics["timing_s/controller_cpu"] = timer.cpu()
        metrics["data/too_long"] = float(self._source.too_long)
        metrics["reward/failures"] = float(self._reward.failures)
        metrics |= step_metrics(batch, scores, seconds, self._trainers.world) | timer.seconds
        self._failures.finished(step)
        self._pending.append(self._thread.submit(self._write, step, metrics, sent, time.time()))
        self._report(
            reward_mean=metrics["critic/score/mean"],
            tokens_per_second_per_gpu=metrics["perf/throughput"],
        )

    def _sync(self, timer: StepTimer) -> "Future[Sent]":
        """Make the current weights version ``step`` of the engines."""
        with timer.phase("update_weights"):
            self._settle()
            sent = self._weights.send(self._step)
        self._pending.append(sent)
        if not self._spec.shares_gpus:
            self._report(weight_version=self._step)
        return sent

    def _engines_turn(self, timer: StepTimer) -> None:
        self._turns.to_engines(timer)
        self._report(weight_version=self._step)

    def _write(self, step: int, metrics: dict[str, float], sent: "Future[Sent]", at: float) -> None:
        """A step's record needs the digests of its weights, which come while the next is generated."""
        found = sent.result()
        self._metrics.write(step, metrics | found.metrics, weights=found.digests, wall_time=at)

    def _settle(self) -> None:
        """What goes on beside the steps comes to its end; raises what it raised."""
        pending, self._pending = self._pending, []
        for future in pending:
            future.result()

    def _checkpoint(self) -> None:
        """Commit what is written; start the next one when it is due."""
        if self._saving:  # asked without need, the ranks would first finish what they do beside the steps
            self._note_complete(self._trainers.call("poll_checkpoint", False))
        if self._memory is not None:
            self._memory.poll()
        if self._step % self._spec.checkpoint.every_steps == 0:
            self._save()
        elif self._memory is not None and self._memory.due(self._step):
            self._producer.save(self._step)
            self._memory.take(self._step, self._record.attempt, self._state())
        every = self._spec.checkpoint.export_every_steps
        if every and self._step % every == 0:
            self._export()

    def _save(self) -> None:
        # One at a time: the files of two would compete, and keep counts complete ones.
        self._note_complete(self._trainers.call("poll_checkpoint", True))
        self._producer.save(self._step)
        self._trainers.call("save_checkpoint", self._step, self._state())
        self._saving = True

    def _save_now(self) -> None:
        self._turns.to_trainers(StepTimer())
        self._settle()  # the record of a step is written before its checkpoint counts
        if self._board.get().last_checkpoint != self._step:
            self._note_complete(self._trainers.call("poll_checkpoint", True))
        if self._board.get().last_checkpoint != self._step:
            self._save()
            self._note_complete(self._trainers.call("poll_checkpoint", True))

    def _export(self) -> None:
        """Write the weights of this step as a Hugging Face directory, unless they are there."""
        path = directory(self._store / "export", self._step)
        if not path.is_dir():
            self._report(message=f"exporting step {self._step}")
            self._trainers.call("export_weights", str(path))
            self._report(message="")

    def _note_complete(self, by_rank: list[list[int]]) -> None:
        for step in by_rank[0]:
            self._board.update(last_checkpoint=step)
            self._saving = False

    def _heed_suspend(self) -> None:
        if not self._board.get().suspend_requested:
            return
        self._report(phase=Phase.SUSPENDING, message="saving a checkpoint")
        self._save_now()
        self._report(phase=Phase.SUSPENDED, message=f"checkpoint of step {self._step} is complete")
        self._board.wait_until_resumed()
        self._report(phase=Phase.TRAINING, message="")

    def _finish(self) -> None:
        self._save_now()
        if self._spec.checkpoint.export_at_end:
            self._export()
        self._trainers.stop()
        self._metrics.end()
        self._report(phase=Phase.SUCCEEDED, message=f"{self._step} steps done", trainers=[])

    def _restart(self, message: str, cause: Cause) -> None:
        """Stop the whole gang and count; wait before the next attempt where the job itself failed."""
        log.warning("attempt %d failed (%s): %s", self._record.attempt, cause, message)
        wait_seconds = self._failures.count(message, cause, self._step + 1)
        self._report(phase=Phase.RECOVERING, message=message[:500], trainers=[])
        self._trainers.stop()
        if not self._record.failed:
            time.sleep(wait_seconds)

    def _state(self) -> dict[str, Any]:
        """State of the controller that a checkpoint carries."""
        return {
            "step": self._step,
            "weight_version": self._step,
            "kl": self._training.kl.state_dict(),
            "source": self._source.state_dict(),
        }

    def _load_state(self, state: dict[str, Any]) -> None:
        self._training.kl.load_state_dict(state["kl"])
        self._source.load_state_dict(state["source"])

    def _report(self, **changes: Any) -> None:
        record = self._record
        self._board.update(step=self._step, attempt=record.attempt, restarts=record.restarts, **changes)
