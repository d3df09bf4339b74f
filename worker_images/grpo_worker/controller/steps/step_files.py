"""Files that record the steps of a run: ledger, metrics, samples and results of validations."""

from collections.abc import Sequence
from dataclasses import dataclass

from grpo_worker.common.ragged_batch import RaggedBatch
from grpo_worker.controller.generation.sample_ledger import SampleLedger
from grpo_worker.controller.step_records import StepRecords
from grpo_worker.controller.validation.validator import Validator
from grpo_worker.rollout.batch_file import RolloutBatch
from grpo_worker.samples.writer import SampleWriter


@dataclass(frozen=True, slots=True)
class StepFiles:
    """The files, each of which a thread of its own writes beside the steps."""

    ledger: SampleLedger
    records: StepRecords
    samples: SampleWriter
    validator: Validator

    def truncate(self, step: int) -> None:
        """Remove what was recorded of steps after ``step``, which will be repeated.

        The validator removes its results when it begins the attempt.
        """
        self.ledger.truncate(step)
        self.records.truncate(step)
        self.samples.truncate(step)

    def keep_samples(
        self, step: int, attempt: int, rollouts: RolloutBatch, scores: Sequence[float], batch: RaggedBatch
    ) -> None:
        """Record on what a step has trained. ``scores``, ``batch``: see StepSamples."""
        self.ledger.append(step, attempt, rollouts.samples, rollouts.left_out, rollouts.refused)
        self.samples.add(step, attempt, rollouts, scores, batch)
        self.records.show_samples(step, rollouts, scores, batch)

    def flush(self) -> None:
        """Wait until all files, as far as written, are on the store; any thread."""
        self.ledger.flush()
        self.records.flush()
        self.samples.flush()
        self.validator.flush()
