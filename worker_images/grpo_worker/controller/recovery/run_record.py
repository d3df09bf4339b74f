"""What must survive the controller itself: attempts, restarts, outcome (``run.json``)."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from grpo_worker.common.files import write_text

Cause = Literal["job", "infrastructure"]


class SupersededError(RuntimeError):
    """Another controller of this job has begun an attempt: this one must touch nothing any more."""


@dataclass(slots=True)
class RunRecord:
    """Mutable record with atomic saves."""

    path: Path = field(repr=False)
    attempt: int = 0
    job_restarts: int = 0
    infrastructure_restarts: int = 0
    failed: str = ""
    last_cause: str = ""  # of the newest restart that the job itself caused
    same_failures: int = 0  # in a row with that cause
    failed_step: int = 0  # the last step that such a failure has hindered

    @classmethod
    def load(cls, path: Path) -> "RunRecord":
        """Read the record, or start a new one."""
        if not path.is_file():
            return cls(path)
        return cls(path, **json.loads(path.read_text()))

    @property
    def restarts(self) -> dict[str, int]:
        """Restarts by cause, as the status shows them."""
        return {"job": self.job_restarts, "infrastructure": self.infrastructure_restarts}

    def save(self) -> None:
        """Raises SupersededError."""
        self.check()
        data = asdict(self)
        del data["path"]
        write_text(self.path, json.dumps(data))

    def begin_attempt(self) -> None:
        """A controller process or a training gang starts. Raises SupersededError."""
        self.check()  # before the number is another's
        self.attempt += 1
        self.save()

    def check(self) -> None:
        """Raises SupersededError once somebody else has begun an attempt.

        A node that is cut off keeps its controller running while Kubernetes starts another elsewhere.
        """
        newest = RunRecord.load(self.path).attempt
        if newest > self.attempt:
            raise SupersededError(f"attempt {newest} has begun elsewhere; this one is {self.attempt}")

    def count_restart(self, cause: Cause, why: str = "", step: int = 0) -> int:
        """Count a restart; how many in a row the job itself has caused for the same reason ``why``.

        ``step``: the one that could not be finished.
        """
        if cause == "job":
            self.job_restarts += 1
            self.same_failures = self.same_failures + 1 if why == self.last_cause else 1
            self.last_cause, self.failed_step = why, max(step, self.failed_step)
        else:
            self.infrastructure_restarts += 1
        self.save()
        return self.same_failures

    def note_progress(self, step: int) -> None:
        """A step was finished. What failed before does not repeat once the step that it hindered is done; the
        steps before that one are only replayed."""
        if self.same_failures and step >= self.failed_step:
            self.last_cause, self.same_failures = "", 0
            self.save()

    def fail(self, reason: str) -> None:
        """Remember for ever that the job gave up."""
        self.failed = reason
        self.save()
