"""Failure handling: another attempt, or the end of the job."""

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx

from grpo_operator.api.errors import cause_of
from grpo_operator.api.messages import NodeFailures
from grpo_worker.common.errors import LONGEST
from grpo_worker.controller.live_fields import LiveFields
from grpo_worker.controller.recovery.departure import Departure
from grpo_worker.controller.recovery.node_failures import noted, report
from grpo_worker.controller.recovery.record_watch import RecordWatch
from grpo_worker.controller.recovery.run_record import Cause, RunRecord
from grpo_worker.rollout.engine_pool import MixedWeightsError, SyncError

log = logging.getLogger(__name__)
MAX_BACKOFF = 300.0  # seconds
CONTROLLER_DIED = "the controller ended unexpectedly"
_OUTSIDE = (OSError, httpx.TransportError, SyncError, MixedWeightsError)


class FailureHandler:
    """Counts failures in the job's record, and ends the job when another attempt cannot help.

    All causes share one back-off: it doubles with each failure and halves with each step that is finished for
    the first time. The limits are those of the job's file at the time of the failure.
    """

    def __init__(
        self, record: RunRecord, live: LiveFields, departure: Departure | None = None,
        nodes: int = 1, wall: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        """``live``: has the restart policy. ``departure``: of pods of the job that are about to end.

        ``nodes``: of the gang. ``wall``: seconds since 1970.
        """
        self.record = record
        self.departure = departure or Departure()
        self.watch = RecordWatch(record)
        self.live = live
        self._nodes, self._wall = nodes, wall
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="run record")

    def resume(self, times: int) -> None:
        """Let a job that has ended go on if it was resumed. ``times``: how often so far."""
        with _ignore_store_errors():
            self.record.resume(times)

    def begin_controller(self) -> float | None:
        """Count the death of the controller before this one, if it died.

        Returns the seconds to wait before the first attempt, or None if there was no death.
        """
        died = False
        with _ignore_store_errors():
            died = self.record.begin_controller()
        return self.count(CONTROLLER_DIED, "infrastructure") if died else None

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Count no death of the controller while the job is suspended."""
        self._note_running(False)
        yield
        self._note_running(True)

    def finished(self) -> None:
        """Count no death of the controller any more."""
        self._note_running(False)

    def count(self, message: str, cause: Cause, step: int = 0, node: str = "") -> float:
        """Record a failure of ``step`` and return the seconds to wait before the next attempt.

        ``node``: on which alone ranks have failed, or "".
        There is no next attempt if ``record.failed`` is set afterwards. Only failures that the job itself
        caused end it: more than ``maxRestarts`` of them, or ``maxSameFailures`` in a row with the same cause.
        """
        self.live.look()
        with _ignore_store_errors():
            self._note_node(node, message)
            self.record.count_restart(cause, cause_of(message), step)
        if cause == "infrastructure":
            return self._backoff(self.record.recent_failures - 1)  # the first replacement starts at once
        policy, same = self.live.restart_policy, self.record.same_failures
        used = self.record.job_restarts - self.record.restarts_before
        if same >= policy.max_same_failures:
            self.end(f"{message} ({same} times in a row)")
        elif used > policy.max_restarts:
            self.end(f"restartPolicy.maxRestarts ({policy.max_restarts}) used up: {message}")
        return self._backoff(self.record.recent_failures)

    def count_slow(self, node: str, reason: str) -> None:
        """Record that a rank on a node has become a straggler."""
        self._note_node(node, reason)
        self._thread.submit(self._save)

    def forget_nodes(self, request: str) -> None:
        """Forget the failures of all nodes if ``request``, a value of the annotation, is new."""
        if request and request != self.record.forgot:
            self.record.node_log, self.record.forgot = {}, request
            self._thread.submit(self._save)

    @property
    def avoided_nodes(self) -> frozenset[str]:
        """Return the nodes on which ranks have failed too often."""
        return frozenset(one.node for one in self._node_failures() if one.avoided)

    def step_finished(self, step: int) -> None:
        """Record that ``step`` was finished, which ends a series of failures.

        A thread saves it, so that a slow store delays no step.
        """
        if self.record.note_progress(step):
            self._thread.submit(self._save)

    def parked(self) -> None:
        """Count that the trainers are parked, saved like a finished step."""
        self.record.times_parked += 1
        self._thread.submit(self._save)

    def counts(self) -> dict[str, Any]:
        """Return the counts of failures, as fields of the status."""
        record = self.record
        return {
            "restarts": record.restarts,
            "times_parked": record.times_parked,
            "node_failures": self._node_failures(),
            "recent_failures": record.recent_failures,
            "backoff_seconds": int(self._backoff(record.recent_failures)),
        }

    def end(self, message: str, regressed: bool = False, diverged: bool = False) -> None:
        """End the job for a reason that another attempt cannot change. Others as in RunRecord."""
        log.error("the job ends: %s", message)
        with _ignore_store_errors():
            self.record.fail(message[:LONGEST], regressed, diverged)

    def _node_failures(self) -> list[NodeFailures]:
        policy = self.live.restart_policy.avoid_nodes
        return report(self.record.node_log, self._wall(), self._nodes, policy)

    def _note_node(self, node: str, reason: str) -> None:
        if node:
            policy, now = self.live.restart_policy.avoid_nodes, self._wall()
            self.record.node_log = noted(self.record.node_log, node, now, reason, policy)

    def _note_running(self, running: bool) -> None:
        self.record.running = running
        self._save()

    def _save(self) -> None:
        with _ignore_store_errors():
            self.record.save()

    def _backoff(self, failures: int) -> float:
        if failures <= 0:
            return 0.0
        first = self.live.restart_policy.backoff_seconds
        return float(min(first * 2.0 ** min(failures - 1, 16), MAX_BACKOFF))


def comes_from_outside(error: BaseException | None) -> bool:
    """Return whether a store, a server, an engine or the network caused an error: waiting may then help."""
    while error is not None:
        if isinstance(error, httpx.HTTPStatusError):
            return error.response.is_server_error
        if isinstance(error, _OUTSIDE):
            return True
        error = error.__cause__
    return False


@contextmanager
def _ignore_store_errors() -> Iterator[None]:
    """Log errors of the store. The record is correct in memory, and the next change saves it again."""
    try:
        yield
    except OSError:
        log.exception("the record of the job cannot be saved")
