"""Writer of the samples of validations, while the responses arrive."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pyarrow.parquet as pq

from grpo_operator.api.v1alpha1.observability import SamplesSpec
from grpo_worker.common.store_path import JobFolder
from grpo_worker.samples.files import VALIDATION, SampleFiles
from grpo_worker.samples.table import ROWS, Decode, Origin
from grpo_worker.samples.validation_table import VALIDATION_SCHEMA, ValidatedGroup, validation_table

log = logging.getLogger(__name__)
# Samples that may wait for a slow store. A file that would need more is given up: the next weights wait for
# the validation.
WAITING_BYTES = 128 << 20


class ValidationSampleWriter:
    """Writes a file for each validated version; a validation that is repeated replaces its file.

    Responses are written when they are scored, in blocks, so a validation of any size needs little memory. A
    file that cannot be written costs nothing else.
    """

    def __init__(
        self, folder: JobFolder, spec: SamplesSpec, decode: Decode, check: Callable[[], None]
    ) -> None:
        """``decode``: see ``validation_table``. ``check``: see ``SampleFiles``."""
        self._files = SampleFiles(folder, VALIDATION, check)
        self._most, self._decode = spec.validation_prompts, decode
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="validation-samples")
        self._asked: Counter[str] = Counter()  # prompts by set
        self._wanted: set[int] = set()  # indices of prompts whose samples are written
        self._lock, self._waiting = threading.Lock(), 0  # bytes
        self._missing = 0  # validations without their file
        # Of the file that is being written; only the thread uses them.
        self._origin = Origin(0, 0, 0.0)
        self._file: pq.ParquetWriter | None = None
        self._block: list[ValidatedGroup] = []
        self._problem = ""

    def begin(self, version: int, attempt: int) -> None:
        """Begin the file of a version. ``attempt``: of the job."""
        self._asked.clear()
        self._wanted.clear()
        if self._most:
            self._thread.submit(self._begin, Origin(version, attempt, time.time()))

    def asked(self, of: str, prompt: int) -> None:
        """Note that engines are asked for responses to a prompt: the first ones of each set are written.

        ``of``: name of the set. ``prompt``: index.
        """
        self._asked[of] += 1
        if self._asked[of] <= self._most:
            self._wanted.add(prompt)

    def add(self, group: ValidatedGroup) -> None:
        """Start to write the samples of a group, if they are wanted."""
        if group.prompt.index not in self._wanted:
            return
        with self._lock:
            fits = not self._waiting or self._waiting + group.bytes <= WAITING_BYTES
            self._waiting += group.bytes if fits else 0
        if fits:
            self._thread.submit(self._add, group)
        else:
            self._thread.submit(self._fail, "the store is slower than the engines")

    def end(self, complete: bool) -> None:
        """Complete the file, or remove it if the validation was not completed."""
        if self._most:
            self._thread.submit(self._end, complete)

    def metrics(self) -> dict[str, float]:
        """Return metrics of the files so far."""
        return {"samples/missing_validations": float(self._missing)}

    def truncate(self, step: int) -> None:
        """Remove the files of all versions after ``step``, which are validated again."""
        self._thread.submit(self._remove_after, step)

    def flush(self) -> None:
        """Wait until the files of all validations that have ended are written or have failed."""
        self._thread.submit(lambda: None).result()

    def _begin(self, origin: Origin) -> None:
        self._origin, self._block, self._problem = origin, [], ""
        self._try(self._create)

    def _add(self, group: ValidatedGroup) -> None:
        if not self._problem:
            self._block.append(group)
            if sum(one.rows for one in self._block) >= ROWS:
                self._try(self._write_block)
        with self._lock:
            self._waiting -= group.bytes

    def _end(self, complete: bool) -> None:
        if complete and not self._problem:
            self._try(self._write_block)
        self._try(self._close)
        if complete and not self._problem:
            self._try(lambda: self._files.publish(self._origin.step))
        if not complete or self._problem:
            self._try(self._files.discard)
        if complete and self._problem:
            self._missing += 1
            step, why = self._origin.step, self._problem
            log.warning("the samples of the validation of step %d are not written: %s", step, why)

    def _create(self) -> None:
        self._file = self._files.create(VALIDATION_SCHEMA)

    def _write_block(self) -> None:
        assert self._file is not None
        block, self._block = self._block, []
        if block:
            self._file.write_table(validation_table(self._origin, block, self._decode))

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - see the class
            self._fail(str(error))

    def _fail(self, why: str) -> None:
        self._problem = self._problem or why
        self._block = []

    def _remove_after(self, step: int) -> None:
        try:
            self._files.remove_after(step)
        except Exception as error:  # noqa: BLE001 - a repeated validation replaces what was not removed
            log.warning("samples of repeated validations are not removed: %s", error)
