"""What becomes of a failure: another attempt, or the end of the job."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from grpo_operator.api.errors import cause_of
from grpo_operator.api.v1alpha1.grpojob import RestartPolicySpec
from grpo_worker.common.errors import LONGEST
from grpo_worker.controller.recovery.run_record import Cause, RunRecord

log = logging.getLogger(__name__)
MAX_BACKOFF = 300.0


class FailureHandler:
    """Counts failures in the job's record, and ends the job when trying again cannot help."""

    def __init__(self, record: RunRecord, policy: RestartPolicySpec) -> None:
        self.record = record
        self._policy = policy
        self._outside = 0  # failures from outside in a row, without a finished step between them

    def count(self, message: str, cause: Cause, step: int = 0) -> float:
        """Note a failure. Returns the seconds to wait before the next attempt; see ``record.failed`` first.

        Only failures of the job itself end it: after ``maxRestarts`` of them, or after ``maxSameFailures``
        in a row that say the same. ``step``: the one that could not be finished.
        """
        with _although_the_store_is_away():
            self.record.count_restart(cause, cause_of(message), step)
        if cause == "infrastructure":
            self._outside += 1
            return self._backoff(self._outside - 1)  # the first replacement starts at once
        same, used = self.record.same_failures, self.record.job_restarts
        if same >= self._policy.max_same_failures:
            self.end(f"{message} ({same} times in a row)")
        elif used > self._policy.max_restarts:
            self.end(f"restartPolicy.maxRestarts ({self._policy.max_restarts}) used up: {message}")
        return self._backoff(used)

    def finished(self, step: int) -> None:
        """A step is done."""
        self._outside = 0
        self.record.note_progress(step)

    def end(self, message: str) -> None:
        """End the job for a reason that no attempt changes."""
        log.error("the job ends: %s", message)
        with _although_the_store_is_away():
            self.record.fail(message[:LONGEST])

    def _backoff(self, times: int) -> float:
        if times == 0:
            return 0.0
        return float(min(self._policy.backoff_seconds * 2.0 ** min(times - 1, 16), MAX_BACKOFF))


@contextmanager
def _although_the_store_is_away() -> Iterator[None]:
    """The record counts in memory when it cannot be saved, and is saved with the next change."""
    try:
        yield
    except OSError:
        log.exception("the record of the job cannot be saved")
