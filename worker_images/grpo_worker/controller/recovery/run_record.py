"""Run record: the attempts, restarts and outcome of a job, which outlive its controller (``run.json``)."""

import json
import threading
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from grpo_worker.common.files import write_text
from grpo_worker.common.known_fields import known

_SAVING = threading.Lock()  # the last save has the newest values
Cause = Literal["job", "infrastructure"]


class SupersededError(RuntimeError):
    """Another controller of this job has begun an attempt, so this one must change nothing any more."""


@dataclass(slots=True)
class RunRecord:
    """Mutable record that is saved atomically with each change."""

    path: Path = field(repr=False)
    attempt: int = 0
    running: bool = False  # a controller runs the job; true when one begins: the one before has died
    job_restarts: int = 0
    infrastructure_restarts: int = 0
    failed: str = ""
    last_cause: str = ""  # of the last restart that the job itself caused
    same_failures: int = 0  # restarts in a row with that cause
    failed_step: int = 0  # the furthest step that such a failure interrupted
    recent_failures: int = 0  # of any cause; a step that is finished for the first time takes one away
    interrupted_step: int = 0  # the furthest step that a failure of any cause interrupted
    times_parked: int = 0  # times that the trainers waited, alive, for engines
    unread: int = 0  # times that the record could not be read beside the steps
    others: dict[str, Any] = field(default_factory=dict, repr=False)  # fields that a newer version wrote

    @classmethod
    def load(cls, path: Path) -> "RunRecord":
        """Read the record, or create a new one. Fields that a newer version wrote are kept."""
        if not path.is_file():
            return cls(path)
        data = json.loads(path.read_text())
        own = known(cls, data)
        return cls(path, **own, others={name: data[name] for name in data.keys() - own.keys()})

    @property
    def restarts(self) -> dict[str, int]:
        """Return the restarts by cause, as in the status."""
        return {"job": self.job_restarts, "infrastructure": self.infrastructure_restarts}

    def save(self) -> None:
        """Write the record to the store, from any thread. Raises SupersededError."""
        with _SAVING:
            self.check()
            data = asdict(self)
            del data["path"]
            write_text(self.path, json.dumps(data.pop("others") | data))

    def begin_controller(self) -> bool:
        """Record that a controller runs; return whether the one before it died. Raises SupersededError."""
        died, self.running = self.running, True
        self.save()
        return died

    def begin_attempt(self) -> None:
        """Count the start of a controller or of a training gang. Raises SupersededError."""
        self.check()  # before this controller claims a number that another one uses
        self.attempt += 1
        self.save()

    def check(self) -> None:
        """Raise SupersededError if another controller has begun an attempt.

        A node without a connection to the cluster keeps its controller running while Kubernetes starts
        another one elsewhere.
        """
        self.refuse(RunRecord.load(self.path).attempt)

    def refuse(self, newest: int) -> None:
        """Raise SupersededError if ``newest``, an attempt in the store, is newer than this one."""
        if newest > self.attempt:
            raise SupersededError(
                f"attempt {newest} has begun in another controller; this one is attempt {self.attempt}"
            )

    def count_restart(self, cause: Cause, why: str = "", step: int = 0) -> int:
        """Count a restart; return how many restarts in a row the job itself caused for the reason ``why``.

        ``step``: the step that was interrupted.
        """
        if cause == "job":
            self.job_restarts += 1
            self.same_failures = self.same_failures + 1 if why == self.last_cause else 1
            self.last_cause, self.failed_step = why, max(step, self.failed_step)
        else:
            self.infrastructure_restarts += 1
        self.recent_failures += 1
        self.interrupted_step = max(step, self.interrupted_step)
        self.save()
        return self.same_failures

    def note_progress(self, step: int) -> bool:
        """Note that a step was finished; return whether the record has changed and should be saved.

        A failure counts as overcome once the step that it interrupted is done. The steps before are replays.
        """
        overcome = self.same_failures and step >= self.failed_step
        if overcome:
            self.last_cause, self.same_failures = "", 0
        new = self.recent_failures and step >= self.interrupted_step
        if new:
            self.recent_failures -= 1
        return bool(overcome or new)

    def fail(self, reason: str) -> None:
        """Record the final failure of the job."""
        self.failed = reason
        self.save()
