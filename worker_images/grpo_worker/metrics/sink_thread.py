"""Thread of one sink, so that a slow service stalls no step."""

import logging
import threading
from collections import deque
from collections.abc import Callable

from grpo_worker.metrics.sinks import Sink

log = logging.getLogger(__name__)
_WAITING = 1000  # steps; a service that is further behind loses the oldest
_END_SECONDS = 60.0


class SinkThread:
    """Calls a sink in a thread of its own, in order.

    A sink that fails is logged once and not used again: a dashboard must not stop a job. ``dropped``: steps
    that were lost because the sink was too slow.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._calls: deque[Callable[[], None]] = deque(maxlen=_WAITING)  # drops the oldest
        self._changed = threading.Condition()
        self._ended = self._failed = False
        self.dropped = 0
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"sink {type(sink).__name__}")
        self._thread.start()

    def call(self, call: Callable[[Sink], None]) -> None:
        """Call the sink later, after all earlier calls."""
        with self._changed:
            if self._failed or self._ended:
                return
            if len(self._calls) == _WAITING:
                self.dropped += 1
                if self.dropped == 1:
                    log.warning("sink %s is %d steps behind and loses steps", self._name, _WAITING)
            self._calls.append(lambda: call(self._sink))
            self._changed.notify()

    def end(self) -> None:
        """Make the calls that wait, for at most a minute."""
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._thread.join(_END_SECONDS)
        if self._thread.is_alive():
            log.warning("sink %s has not taken its last %d calls", self._name, len(self._calls) + 1)

    @property
    def _name(self) -> str:
        return type(self._sink).__name__

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._calls or self._ended)
                if not self._calls:
                    return
                call = self._calls.popleft()
            try:
                call()
            except Exception:  # the client of a service may raise anything
                log.exception("sink %s failed and is not used any more", self._name)
                with self._changed:
                    self._failed = True
                    self._calls.clear()
                return
