"""Thread of one sink, so that a slow service stalls no step."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Literal

from grpo_worker.common.errors import one_line
from grpo_worker.metrics.sinks.base import Opening, Sink

log = logging.getLogger(__name__)
_WAITING = 1000  # calls; a service that is further behind loses the oldest
_TABLES = 8  # that wait, of at most some megabytes each; a service that is further behind loses the new ones
What = Literal["metrics", "tables", "artifacts"]


class SinkThread:
    """Opens a sink and calls it in a thread of its own, in order.

    What a sink fails to take is logged once, and it gets nothing of that kind again: a dashboard must not
    stop a job. ``dropped``: steps that were lost because the sink was too slow.
    """

    def __init__(self, opening: Opening) -> None:
        self._opening = opening
        self._sink: Sink | None = None
        self._calls: deque[tuple[What, Callable[[Sink], None]]] = deque(maxlen=_WAITING)  # drops the oldest
        self._changed = threading.Condition()
        self._ended = False
        self._failed: set[What] = set()
        self.dropped = self.dropped_tables = 0
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"sink {opening.name}")
        self._thread.start()

    def call(self, call: Callable[[Sink], None], what: What = "metrics") -> None:
        """Call the sink later, after all earlier calls. ``what``: it gets by the call."""
        with self._changed:
            if self._ended or what in self._failed or not self._has_room(what):
                return
            self._calls.append((what, call))
            self._changed.notify()

    def finish(self) -> None:
        """Take no more calls."""
        with self._changed:
            self._ended = True
            self._changed.notify()

    def join(self, deadline: float) -> None:
        """Wait for the calls that wait, after ``finish``. ``deadline``: on the clock ``time.monotonic``."""
        self._thread.join(max(deadline - time.monotonic(), 0.0))
        if self._thread.is_alive():
            log.warning(
                "sink %s has not taken its last %d calls: %s",
                self._opening.name, len(self._calls) + 1, self._opening.remedy,
            )  # fmt: skip

    def _has_room(self, what: What) -> bool:
        """Return whether a call may wait, and note what is lost if it may not, or displaces another one."""
        if what == "tables" and sum(one == "tables" for one, _ in self._calls) >= _TABLES:
            self.dropped_tables += 1
            if self.dropped_tables == 1:
                log.warning("sink %s is %d tables behind and loses tables", self._opening.name, _TABLES)
            return False
        if len(self._calls) == _WAITING:
            self.dropped += 1
            if self.dropped == 1:
                log.warning("sink %s is %d steps behind and loses steps", self._opening.name, _WAITING)
        return True

    def _run(self) -> None:
        try:
            self._sink = self._opening.open()
        except Exception as error:  # noqa: BLE001 - the client of a service may raise anything
            self._fail("metrics", "cannot be opened", error)
            return
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._calls or self._ended)
                if not self._calls:
                    return
                what, call = self._calls.popleft()
            try:
                if what not in self._failed:
                    call(self._sink)
            except Exception as error:  # noqa: BLE001 - as above
                self._fail(what, f"does not take {what}", error)
                if what == "metrics":
                    return

    def _fail(self, what: What, problem: str, error: Exception) -> None:
        """Give up a kind of calls; without metrics a sink gets nothing."""
        gets = "is not used" if what == "metrics" else f"gets no {what}"
        name, remedy = self._opening.name, self._opening.remedy
        log.warning(
            "sink %s %s and %s any more until the controller restarts: %s: %s",
            name, problem, gets, one_line(error), remedy, exc_info=True,
        )  # fmt: skip
        with self._changed:
            self._failed |= {"metrics", "tables", "artifacts"} if what == "metrics" else {what}
            if what == "metrics":
                self._calls.clear()
