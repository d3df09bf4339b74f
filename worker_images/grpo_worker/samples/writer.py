"""Writer of the samples of each step, beside the next step."""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from grpo_operator.api.v1alpha1.observability import SamplesSpec
from grpo_worker.common.clock import SYSTEM_CLOCK, Clock
from grpo_worker.common.ragged_batch import RaggedBatch
from grpo_worker.common.store_path import JobFolder
from grpo_worker.rollout.batch_file import RolloutBatch
from grpo_worker.samples.files import TRAINING, SampleFiles
from grpo_worker.samples.table import SCHEMA, Decode, Origin, StepSamples, tables

log = logging.getLogger(__name__)


class SampleWriter:
    """Writes a file for each step; the replay of a step replaces its file.

    A file that cannot be written costs no step: samples are there to look at, and the ledger proves what was
    trained on.
    """

    def __init__(
        self,
        folder: JobFolder,
        spec: SamplesSpec,
        decode: Decode,
        check: Callable[[], None],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """``decode``: see ``tables``. ``check``: see ``SampleFiles``."""
        self._missing = 0  # steps without their file
        self._seconds = 0.0  # of the last file
        self._files = SampleFiles(folder, TRAINING, check)
        self._spec, self._decode, self._clock = spec, decode, clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="samples")
        self._writing: Future[None] | None = None
        self._removing: Future[None] | None = None

    def add(
        self, step: int, attempt: int, rollouts: RolloutBatch, scores: Sequence[float], batch: RaggedBatch
    ) -> None:
        """Start to write the samples of a step, unless those of the step before are still being written."""
        every = self._spec.every_steps
        if not every or step % every:
            return
        if self._writing is not None and not self._writing.done():  # two steps' samples may not fit in memory
            self._note(step, "the store is slower than the steps")
            return
        samples = StepSamples(Origin(step, attempt, time.time()), rollouts, scores, batch)
        self._writing = self._thread.submit(self._try, samples)

    def metrics(self) -> dict[str, float]:
        """Return metrics of the files so far."""
        return {"samples/missing_steps": float(self._missing), "samples/write_s": self._seconds}

    def truncate(self, step: int) -> None:
        """Remove the files of all steps after ``step``: they are repeated, by this or another job."""
        self._removing = self._thread.submit(self._remove_after, step)

    def flush(self) -> None:
        """Wait until the files of all steps are written or have failed."""
        for future in (self._removing, self._writing):
            if future is not None:
                future.result()

    def _try(self, samples: StepSamples) -> None:
        began = self._clock.now()
        try:
            self._write(samples)
        except Exception as error:  # noqa: BLE001 - see the class
            self._note(samples.origin.step, str(error))
        self._seconds = self._clock.now() - began

    def _note(self, step: int, why: str) -> None:
        self._missing += 1
        log.warning("the samples of step %d are not written: %s", step, why)

    def _write(self, samples: StepSamples) -> None:
        with self._files.create(SCHEMA) as file:
            for table in tables(samples, self._decode, self._spec.prompts):
                file.write_table(table)
        self._files.publish(samples.origin.step)

    def _remove_after(self, step: int) -> None:
        try:
            self._files.remove_after(step)
        except Exception as error:  # noqa: BLE001 - the replay replaces what was not removed
            log.warning("samples of repeated steps are not removed: %s", error)
