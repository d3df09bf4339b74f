"""Outcome of a step: what is recorded, counted and decided by what it has done."""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from grpo_worker.common.ragged_batch import RaggedBatch
from grpo_worker.controller.loop_state import LoopState
from grpo_worker.controller.recovery.checkpoints import RunCheckpoints
from grpo_worker.controller.recovery.failures import FailureHandler
from grpo_worker.controller.status.gpu_time import GpuTime
from grpo_worker.controller.steps.status_report import StatusReport
from grpo_worker.controller.steps.step_files import StepFiles
from grpo_worker.controller.training.batch_trainer import BatchTrainer
from grpo_worker.controller.training.gang import TrainerGang
from grpo_worker.controller.validation.divergence import DivergenceWatch
from grpo_worker.controller.weight_sync.synchronizer import PushResult
from grpo_worker.data.prompts import PromptSource
from grpo_worker.metrics.generation import refused_message
from grpo_worker.metrics.step import step_metrics
from grpo_worker.metrics.timing import StepTimer
from grpo_worker.rewards.manager import RewardManager
from grpo_worker.rollout.batch_file import RolloutBatch


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """A step on whose samples the trainers have trained.

    ``scores``, ``batch``: see StepSamples. ``metrics``: so far. ``timer``: of the phases so far.
    """

    step: int
    rollouts: RolloutBatch
    scores: Sequence[float]
    batch: RaggedBatch
    metrics: dict[str, float]
    timer: StepTimer


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Writes the records of a step, counts it, reports it, and ends the attempt if training diverges."""

    state: LoopState
    source: PromptSource
    reward: RewardManager
    trainers: TrainerGang
    training: BatchTrainer
    checkpoints: RunCheckpoints
    failures: FailureHandler
    gpus: GpuTime
    files: StepFiles
    divergence: DivergenceWatch
    report: StatusReport

    def begin_attempt(self, records: Iterable[Mapping[str, Any]], resumed: int) -> None:
        """Count the steps so far; see DivergenceWatch. Raises DivergedError."""
        self.divergence.begin_attempt(records, resumed)
        self._check_divergence()

    def keep_samples(self, trained: TrainedStep) -> None:
        """Record on what a step has trained."""
        attempt = self.failures.record.attempt
        self.files.keep_samples(trained.step, attempt, trained.rollouts, trained.scores, trained.batch)

    def note_trained(self, trained: TrainedStep) -> None:
        """Count a step whose weights are not pushed yet, so that a checkpoint contains it."""
        self.state.step = trained.step
        self.source.trained(trained.rollouts.taken)
        written = self.files.records.write(trained.step, dict(trained.metrics), trained.timer)
        self.state.background.add(written)

    def note_finished(self, trained: TrainedStep, pushed: "Future[PushResult]") -> None:
        """Record, count and report a finished step. Raises DivergedError."""
        step, seconds = trained.step, trained.timer.total()
        metrics = trained.metrics | self._counts()
        metrics |= self.files.records.generated(trained.rollouts, seconds)
        metrics |= step_metrics(trained.batch, trained.scores, seconds, self.trainers.world)
        self.failures.step_finished(step)
        self._count_stragglers()
        self.state.background.add(self.files.records.write(step, metrics, trained.timer, pushed))
        watch, refused = self.training.watch, refused_message(trained.rollouts.refused)
        self.report.update(
            reward_mean=metrics["critic/score/mean"],
            tokens_per_second_per_gpu=metrics["perf/throughput"], step_seconds=seconds,
            message=self.checkpoints.with_problem(refused),
            stragglers=watch.stragglers, straggler_count=watch.count,
        )  # fmt: skip
        self.divergence.note(step, metrics)
        self._check_divergence()

    def _check_divergence(self) -> None:
        self.divergence.check(self.state.spec.total_steps, self.source.behind_drawn())

    def _counts(self) -> dict[str, float]:
        """Return metrics that count what has happened so far, and those of the GPUs' idle time."""
        record = self.failures.record
        counts = {
            "data/too_long": float(self.source.too_long),
            "recovery/unread_records": float(record.unread),
            "recovery/checkpoint_put_off_steps": float(self.checkpoints.put_off),
            "reward/failures": float(self.reward.failures),
        }
        if record.rollbacks:
            counts["recovery/rollbacks"] = float(record.rollbacks)
        return counts | self.files.samples.metrics() | self.files.validator.metrics() | self.gpus.idle

    def _count_stragglers(self) -> None:
        """Count against their nodes the ranks that have become stragglers in this step."""
        for one in self.training.watch.new:
            node = self.trainers.hosts[one.rank].node
            self.failures.count_slow(node, f"rank {one.rank} computes {one.ratio} times its peers' median")
