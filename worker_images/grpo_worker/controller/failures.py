"""What becomes of a failure: another attempt, or the end of the job."""

import logging
from dataclasses import dataclass

from grpo_operator.api.errors import cause_of, last_error_line
from grpo_operator.api.grpojob import RestartPolicySpec
from grpo_worker.controller.run_record import Cause, RunRecord

log = logging.getLogger(__name__)
LONGEST = 1000  # characters of a message in status
MAX_BACKOFF = 300.0


def describe(error: BaseException) -> str:
    """One line for people: the exception that a Ray task raised, not Ray's own account of it."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, BaseException):
        error = cause
    text = str(error)
    if "Traceback" in text:
        return last_error_line(text)
    return f"{type(error).__name__}: {' '.join(text.split())}"[:LONGEST]


@dataclass(frozen=True, slots=True)
class FailureHandler:
    """Counts failures in the job's record, and ends the job when trying again cannot help."""

    record: RunRecord
    policy: RestartPolicySpec

    def count(self, message: str, cause: Cause) -> float:
        """Note a failure. Returns the seconds to wait before the next attempt; see ``record.failed`` first.

        Only failures of the job itself end it: after ``maxRestarts`` of them, or after ``maxSameFailures``
        in a row that say the same.
        """
        same = self.record.count_restart(cause, cause_of(message))
        if cause == "infrastructure":
            return 0.0
        used = self.record.job_restarts
        if same >= self.policy.max_same_failures:
            self.end(f"{message} ({same} times in a row)")
        elif used > self.policy.max_restarts:
            self.end(f"restartPolicy.maxRestarts ({self.policy.max_restarts}) used up: {message}")
        return float(min(self.policy.backoff_seconds * 2 ** (used - 1), MAX_BACKOFF))

    def end(self, message: str) -> None:
        """End the job for a reason that no attempt changes."""
        log.error("the job ends: %s", message)
        self.record.fail(message[:LONGEST])
