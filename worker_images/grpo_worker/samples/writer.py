"""Writer of the samples of each step, beside the next step."""

import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pyarrow.parquet as pq

from grpo_operator.api.v1alpha1.observability import SamplesSpec
from grpo_worker.common.clock import SYSTEM_CLOCK, Clock
from grpo_worker.common.files import rename
from grpo_worker.common.ragged_batch import RaggedBatch
from grpo_worker.common.store_path import JobFolder, StorePath, children, remove_file
from grpo_worker.rollout.batch_file import RolloutBatch
from grpo_worker.samples.table import SCHEMA, Decode, StepSamples, tables

log = logging.getLogger(__name__)
FOLDER = "samples"
_SUFFIX = ".parquet"
_REPEATED = ["step", "attempt", "time", "prompt", "dropped", "version", "engine"]  # columns of few values


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
        """``decode``: see ``tables``. ``check``: called before a file appears; raises if this job has another
        controller now.
        """
        self._missing = 0  # steps without their file
        self._seconds = 0.0  # of the last file
        self._place: StorePath = folder.store / FOLDER
        self._draft = folder.disk / FOLDER / "draft"
        self._spec, self._decode, self._check, self._clock = spec, decode, check, clock
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
        samples = StepSamples(step, attempt, time.time(), rollouts, scores, batch)
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
            self._note(samples.step, str(error))
        self._seconds = self._clock.now() - began

    def _note(self, step: int, why: str) -> None:
        self._missing += 1
        log.warning("the samples of step %d are not written: %s", step, why)

    def _write(self, samples: StepSamples) -> None:
        self._draft.parent.mkdir(parents=True, exist_ok=True)
        with pq.ParquetWriter(self._draft, SCHEMA, compression="zstd", use_dictionary=_REPEATED) as file:
            for table in tables(samples, self._decode, self._spec.prompts):
                file.write_table(table)
        with self._draft.open("rb") as handle:
            os.fsync(handle.fileno())
        self._check()
        target = self._place / file_name(samples.step)
        if isinstance(target, Path):
            rename(self._draft, target)
        else:
            target.fs.put_file(str(self._draft), target.path)
            self._draft.unlink()

    def _remove_after(self, step: int) -> None:
        try:
            self._check()
            for name in children(self._place):
                if name.endswith(_SUFFIX) and step_of(name) > step:
                    remove_file(self._place / name)
        except Exception as error:  # noqa: BLE001 - the replay replaces what was not removed
            log.warning("samples of repeated steps are not removed: %s", error)


def file_name(step: int) -> str:
    """Return the name of a step's file."""
    return f"{step:08d}{_SUFFIX}"


def step_of(name: str) -> int:
    """Return the step of a file's name."""
    return int(name.removesuffix(_SUFFIX))
