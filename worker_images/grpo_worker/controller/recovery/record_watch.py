"""Watch of the run record: notices, beside the steps, that another controller has begun an attempt."""

import logging
from concurrent.futures import Future, ThreadPoolExecutor

from grpo_worker.controller.recovery.run_record import RunRecord

log = logging.getLogger(__name__)


class RecordWatch:
    """Reads the record in a thread, once a step at most, so that a slow store delays no step.

    A step may therefore begin after the attempt of another controller. That is harmless: each change of the
    record checks again, and engines refuse weights of an older attempt. For the same reason a record that
    cannot be read costs no restart.
    """

    def __init__(self, record: RunRecord) -> None:
        self._record = record
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="run record")
        self._reading: Future[int] | None = None

    def check(self) -> None:
        """Raise SupersededError if the last read that has ended found a newer attempt; begin the next one."""
        reading = self._reading
        if reading is not None and not reading.done():
            return
        self._reading = self._thread.submit(self._newest)
        if reading is None:
            return
        try:
            newest = reading.result()
        except (OSError, ValueError) as error:
            self._record.unread += 1
            log.warning("%s cannot be read, and is read again: %s", self._record.path, error)
        else:
            self._record.refuse(newest)

    def _newest(self) -> int:
        return RunRecord.load(self._record.path).attempt
