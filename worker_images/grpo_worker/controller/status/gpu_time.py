"""Records what the job's GPUs do, over all its controllers, in ``gpu_time.json`` of the store."""

import json
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from grpo_worker.common.clock import Clock
from grpo_worker.common.files import write_text
from grpo_worker.common.store_path import StorePath, has_file
from grpo_worker.metrics.gpu_time import GpuAccount, Use

log = logging.getLogger(__name__)
SUSPENDED = "suspended"  # the pods are deleted then, so the time until the next controller does not count


class GpuTime:
    """Thread-safe account of GPU time, from the start of the first controller.

    ``trainers``, ``engines``, ``spares``: GPUs of each pool; see GpuAccount. ``wall``: seconds since 1970,
    which measure the time between two controllers.
    """

    def __init__(
        self, file: StorePath, trainers: int, engines: int, clock: Clock,
        wall: Callable[[], float] = time.time, *, spares: int = 0, resumed: bool = False,
        suspends: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """``resumed``: the job had ended before; it had no GPUs since then. ``suspends``: called when it is
        suspended.
        """
        self.idle: dict[str, float] = {}  # metrics of the last finished step, see GpuAccount
        self.absent: float | None = None  # seconds without a controller; None: there was none to replace
        self._file, self._clock, self._wall = file, clock, wall
        self._account = GpuAccount(trainers, engines, spares)
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gpu time")
        self._suspends = suspends
        self._furthest = 0  # the last step that was ever finished
        self._before: Use | None = None  # what the trainers did before a pause
        self._purposes: set[str] = set()  # for which answers are generated now
        self._load(resumed)
        self._last = self._now()
        if resumed:
            self.save()

    def trains(self, use: Use) -> None:
        """Record what the trainers do from now on."""
        with self._lock:
            self._advance()
            self._before = None
            self._account.trains(use)

    def generates(self, generating: bool, purpose: str = "training") -> None:
        """Record whether answers are generated for a purpose from now on."""
        with self._lock:
            self._advance()
            (self._purposes.add if generating else self._purposes.discard)(purpose)
            self._account.generates(bool(self._purposes))

    def stops(self, cause: str) -> None:
        """Record that the trainers can do nothing because of ``cause``."""
        with self._lock:
            self._advance()
            self._before = self._before or self._account.use
            self._account.stops(cause)
        if cause == SUSPENDED:
            self._suspends()
        self.save()

    def goes_on(self) -> None:
        """Record that the trainers do again what they did before they stopped."""
        if self._before is not None:
            self.trains(self._before)

    def finish_step(self, step: int) -> bool:
        """Record that a step is finished; return whether it was never finished before."""
        with self._lock:
            self._advance()
            new = step > self._furthest
            self.idle = self._account.idle()
            self._account.finish_step(replayed=not new)
            self._furthest = max(step, self._furthest)
        self.save()
        return new

    def interrupt(self, keeps_answers: bool) -> None:
        """Record that the unfinished step will be repeated; see GpuAccount."""
        with self._lock:
            self._advance()
            self._account.interrupt(keeps_answers)

    def report(self) -> dict[str, Any]:
        """Return whole GPU seconds by use, and those lost by cause, as fields of the status."""
        with self._lock:
            self._advance()
            used, lost = self._account.total, self._account.lost
            return {
                "gpu_seconds": {str(use): used[use] // 10**9 for use in Use},
                "lost_gpu_seconds": {cause: spent // 10**9 for cause, spent in sorted(lost.items())},
            }

    def save(self) -> "Future[None]":
        """Start to write the account to the store; a store that fails delays nothing."""
        with self._lock:
            self._advance()
            state = self._account.state() | {
                "furthest": self._furthest,
                "suspended": self._account.stopped_by(SUSPENDED),
                "at": self._wall(),
            }
        return self._thread.submit(self._write, state)

    def _write(self, state: dict[str, Any]) -> None:
        try:
            write_text(self._file, json.dumps(state))
        except OSError:
            log.exception("the account of GPU time cannot be saved")

    def _load(self, resumed: bool) -> None:
        if not has_file(self._file):
            return
        state = json.loads(self._file.read_text())
        self._account.load(state)
        self._furthest = state["furthest"]
        absent = max(int((self._wall() - state["at"]) * 1e9), 0)
        if not state["suspended"] and not resumed:
            self._account.absent(absent, "controller")
            self.absent = absent / 1e9
        self._account.stops("controller")

    def _advance(self) -> None:
        now = self._now()
        self._account.add(now - self._last)
        self._last = now

    def _now(self) -> int:
        return int(self._clock.now() * 1e9)
