"""Records how long recoveries of a job take, in ``recoveries.jsonl`` of its folder and in the metrics."""

import json
import logging
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from grpo_operator.api.messages import RecoveryReport
from grpo_worker.common.clock import Clock, utc_time
from grpo_worker.metrics.recovery import Part, Recovery, observe

log = logging.getLogger(__name__)
_KEPT = 1000  # records that wait for the store


class RecoveryTimes:
    """Recoveries of a controller: one at a time, from a fault until the interrupted step is finished.

    ``last``: the latest that is complete. A store that fails delays nothing: what it did not take is written
    with the next record.
    """

    def __init__(self, file: Path, clock: Clock) -> None:
        self._file, self._clock = file, clock
        self._recovery: Recovery | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="recoveries")
        self._unwritten: deque[dict[str, Any]] = deque(maxlen=_KEPT)
        self.last: RecoveryReport | None = None

    def begins(self, cause: str, since: float | None = None, why: str = "") -> None:
        """Record that the gang has to be stopped. ``since``: time of the fault; None: it is now.

        ``why``: the failure's message.
        """
        now = self._clock.now()
        began = now if since is None else min(since, now)
        if self._recovery is None:
            self._recovery = Recovery(cause, began, why)
            self._recovery.enters(Part.STOP, now)
        else:
            self._recovery.repeats(began, now)

    def enters(self, part: Part) -> None:
        """Begin the next part, if there is a recovery."""
        if self._recovery is not None:
            self._recovery.enters(part, self._clock.now())

    def ends(self, step: int) -> "Future[None] | None":
        """Record that ``step``, which the fault interrupted, is finished; return the write of the record."""
        recovery, self._recovery = self._recovery, None
        if recovery is None:
            return None
        total = recovery.ends(self._clock.now())
        observe(recovery.cause, total, recovery.seconds)
        parts = {part: f"{seconds:.1f}" for part, seconds in recovery.seconds.items()}
        self.last = RecoveryReport(cause=recovery.cause, step=step, seconds=f"{total:.1f}", parts=parts)
        parts_of = {part: round(seconds, 3) for part, seconds in recovery.seconds.items()}
        line = {"at": utc_time(), "cause": recovery.cause, "step": step, "seconds": round(total, 3)}
        return self._thread.submit(self._append, line | {"parts": parts_of, "why": recovery.why})

    def discard(self) -> None:
        """Forget the recovery: the job is suspended in the middle of it."""
        self._recovery = None

    def _append(self, line: dict[str, Any]) -> None:
        self._unwritten.append(line)
        try:
            with self._file.open("a") as file:
                file.write("".join(json.dumps(record) + "\n" for record in self._unwritten))
        except OSError:
            log.exception("%d recoveries cannot be recorded yet", len(self._unwritten))
        else:
            self._unwritten.clear()
