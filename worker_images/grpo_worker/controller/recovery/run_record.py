"""Run record: the attempts, restarts and outcome of a job, which outlive its controller (``run.json``)."""

import json
import threading
import uuid
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from typing import Any, Literal

from grpo_worker.checkpointing import attempts
from grpo_worker.checkpointing.attempts import SupersededError
from grpo_worker.checkpointing.rollbacks import Rollback, note, rollbacks
from grpo_worker.common.clock import utc_time
from grpo_worker.common.files import write_text
from grpo_worker.common.known_fields import known
from grpo_worker.common.store_path import StorePath, children, has_file, remove_file

_SAVING = threading.Lock()  # the last save has the newest values
Cause = Literal["job", "infrastructure"]
_TRIES = 5  # to save the record
_OWN = ("path", "owner", "begun", "resumed", "rollbacks")  # fields of this process, which are not saved


@dataclass(slots=True)
class RunRecord:
    """Mutable record that is saved atomically with each change."""

    path: StorePath = field(repr=False)
    owner: str = field(default_factory=lambda: uuid.uuid4().hex)  # id of this controller
    begun: bool = False  # this controller has begun an attempt
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
    resumes: int = 0  # times that the job was resumed after its end
    regressed: bool = False  # the job has failed because its validation scores have fallen
    diverged: bool = False  # the job has failed because a metric has stayed outside of its range
    resumes_noted: int = 0  # resumptions until the one that began at resumed_step
    resumed_step: int = -1  # step from which the job went on after it was resumed last; -1: it was not
    restarts_before: int = 0  # job_restarts until the last of them, which no limit counts any more
    rollbacks_before: int = 0  # rollbacks, likewise
    resumed: bool = False  # this controller is the first one after such a resumption
    rollbacks: int = 0  # those that are noted in a file of their own
    node_log: dict[str, list[tuple[float, str]]] = field(default_factory=dict)  # failures by node
    forgot: str = ""  # value of the annotation that cleared node_log last
    unread: int = 0  # times that the record could not be read beside the steps
    others: dict[str, Any] = field(default_factory=dict, repr=False)  # fields that a newer version wrote

    @classmethod
    def load(cls, path: StorePath) -> "RunRecord":
        """Read the record, or create a new one. Fields that a newer version wrote are kept.

        An attempt counts as soon as it is claimed, even if its controller died before it saved the record.
        """
        saved = json.loads(path.read_text()) if has_file(path) else {}
        own = {name: value for name, value in known(cls, saved).items() if name not in (*_OWN, "others")}
        record = cls(path, **own, others={name: saved[name] for name in saved.keys() - own.keys()})
        record.attempt = max(record.attempt, attempts.newest(path.parent))
        record.rollbacks = len(rollbacks(path.parent))
        return record

    @property
    def restarts(self) -> dict[str, int]:
        """Return the restarts by cause, as in the status."""
        counts = {"job": self.job_restarts, "infrastructure": self.infrastructure_restarts}
        return counts | ({"rollback": self.rollbacks} if self.rollbacks else {})

    def save(self) -> None:
        """Write the record to the store, from any thread. Raises SupersededError."""
        draft = f"{self.path.stem}.{self.owner}.tmp"
        with _SAVING:
            for left in reversed(range(_TRIES)):
                self.check()
                saved = {key: value for key, value in asdict(self).items() if key not in _OWN}
                try:
                    write_text(self.path, json.dumps(saved.pop("others") | saved), draft)
                    return
                except FileNotFoundError:
                    # Another controller that began an attempt at this moment has removed the draft. If its
                    # attempt is the newer one, the next check says so.
                    if not left:
                        raise

    def resume(self, times: int) -> None:
        """Take back the end of the job if it was resumed; ``times``: how often so far. Raises OSError.

        The counts of restarts stay. Limits and the back-off begin again.
        """
        if times <= self.resumes:
            return
        self.resumes, self.restarts_before, self.resumed = times, self.job_restarts, True
        self.rollbacks_before = self.rollbacks
        self.failed, self.last_cause, self.running = "", "", False
        self.regressed = self.diverged = False
        self.same_failures = self.recent_failures = 0
        self.node_log = {}
        self.save()

    def begin_controller(self) -> bool:
        """Record that a controller runs; return whether the one before it died. Raises SupersededError."""
        died, self.running = self.running, True
        self.save()
        return died

    def begin_attempt(self) -> None:
        """Count the start of a controller or of a training gang. Raises SupersededError.

        No two controllers get the same number. A controller takes over when it begins its first attempt: an
        older one finds itself superseded.
        """
        self.check()
        while not attempts.claim(self.path.parent, self.attempt + 1, self.owner):
            if self.begun:
                self.check()
                raise SupersededError(f"attempt {self.attempt + 1} was claimed by another controller")
            self.attempt = max(self.attempt + 1, attempts.newest(self.path.parent))
        self.attempt, self.begun = self.attempt + 1, True
        for name in children(self.path.parent):
            if fnmatch(name, f"{self.path.stem}.*.tmp"):
                remove_file(self.path.parent / name)  # left by controllers that died
        self.save()

    def note_restored(self, step: int) -> None:
        """Note the step from which the attempt starts. Raises SupersededError."""
        self.check()
        attempts.note_restored(self.path.parent, self.attempt, step)

    def went_on_from(self, step: int) -> int:
        """Return the step from which the job went on after it was resumed last; -1 if it never was.

        ``step``: from which this attempt goes on. Raises SupersededError and OSError.
        """
        if self.resumes_noted != self.resumes:
            self.resumes_noted, self.resumed_step = self.resumes, step
            self.save()
        return self.resumed_step

    def check(self) -> None:
        """Raise SupersededError if another controller has begun an attempt since this one began its own.

        A node without a connection to the cluster keeps its controller running while Kubernetes starts
        another one elsewhere.
        """
        newest = RunRecord.load(self.path).attempt
        if self.begun:
            self.refuse(newest)
        self.attempt = max(self.attempt, newest)

    def check_claims(self) -> None:
        """Raise SupersededError if another controller has claimed an attempt; from any thread."""
        self.refuse(attempts.newest(self.path.parent))

    def refuse(self, newest: int) -> None:
        """Raise SupersededError if ``newest``, an attempt in the store, is newer and of another controller.

        Its claim may have been made for this one without an answer, or a moment ago by another thread.
        """
        if newest > self.attempt and not attempts.owned(self.path.parent, newest, self.owner):
            attempts.refuse(newest, self.attempt)

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

    def roll_back(self, step: int, position: dict[str, Any], why: str) -> None:
        """Go back to the checkpoint of ``step``; see Rollback. No limit of failures counts it.

        Raises SupersededError and OSError.
        """
        self.check()
        note(self.path.parent, Rollback(step, self.attempt, position, why, utc_time()))
        self.rollbacks += 1

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

    def fail(self, reason: str, regressed: bool = False, diverged: bool = False) -> None:
        """Record the final failure of the job. ``regressed``, ``diverged``: as the fields."""
        self.failed, self.regressed, self.diverged = reason, regressed, diverged
        self.save()
