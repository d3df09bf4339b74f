"""Parking: while engines, the reward or room in the store are away, the trainers wait, alive."""

import logging
import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, TypeVar

from grpo_operator.api.v1alpha1.status import Phase
from grpo_worker.common.clock import Clock, utc_time
from grpo_worker.common.errors import one_line
from grpo_worker.controller.recovery.departure import LeavingError
from grpo_worker.controller.recovery.failures import FailureHandler
from grpo_worker.controller.status.gpu_time import SUSPENDED, GpuTime
from grpo_worker.controller.status.progress import ProgressBoard
from grpo_worker.controller.training.gang import TrainerGang
from grpo_worker.controller.training.worker_group import GangError
from grpo_worker.data.routed_experts import ExpertsLostError
from grpo_worker.rollout.engine_pool import SyncError

log = logging.getLogger(__name__)
POLL_SECONDS = 2.0
# Too few engines have the version, none serves it or keeps its experts, the reward server fails or does not
# answer, or no process of the reward function starts.
AWAY = (SyncError, TimeoutError, ConnectionError, ExpertsLostError)
_T = TypeVar("_T")


class Parking:
    """Runs work that needs engines.

    While it runs, a rank that dies ends the wait at once, and so does a call of the ranks that fails in the
    background. Work that was interrupted so may be continued by the next gang, which can then restore while
    answers are generated.
    """

    def __init__(
        self,
        trainers: TrainerGang,
        board: ProgressBoard,
        failures: FailureHandler,
        clock: Clock,
        gpus: GpuTime,
        background: Callable[[], Sequence[Future[Any]]] = tuple,
    ) -> None:
        """``background``: returns what runs beside the work, such as the staging of weights."""
        self._departure = failures.departure
        self._gpus = gpus
        self._background = background
        self._trainers = trainers
        self._board = board
        self._failures = failures
        self._clock = clock
        self._left: tuple[Hashable, Future[Any]] | None = None  # work that has outlived its gang

    def run(
        self, work: Callable[[], _T], park: Callable[[], None] = lambda: None, key: Hashable = None
    ) -> _T:
        """Return the result of ``work``, which can be repeated after an error of AWAY.

        After such an error the trainers are parked until the work succeeds. ``park``: called once, when they
        are parked. ``key``: identifies work that a new gang may continue. Raises GangError when a rank dies,
        and LeavingError when pods are about to end.
        """
        parked: tuple[Phase, str] | None = None  # phase and message before, and since when
        while True:
            try:
                result = self._beside_gang(work, key)
            except AWAY as error:
                first = parked is None
                parked = parked or self._begin()
                self._report(str(error) or one_line(error), parked[1])
                if first:
                    park()
                self._clock.sleep(POLL_SECONDS)
                self._trainers.check()
                self._departure.check()
                self._failures.watch.check()
                self._suspend_if_requested()
            else:
                if parked is not None:
                    self._end(parked[0])
                return result

    def wait_while(self, missing: Callable[[], str]) -> None:
        """Park the trainers while ``missing`` says what is missing. Raises GangError when a rank dies."""
        parked: tuple[Phase, str] | None = None
        while reason := missing():
            parked = parked or self._begin("infrastructure")
            self._report(reason, parked[1])
            self._clock.sleep(POLL_SECONDS)
            self._trainers.check()
            self._failures.watch.check()
        if parked is not None:
            self._end(parked[0])

    def wait_until_resumed(self) -> None:
        """Wait until the request to suspend is cleared. The job is saved, and may lose its controller."""
        self._gpus.stops(SUSPENDED)
        with self._failures.idle(), self._departure.idle():
            self._board.wait_until_resumed()

    def continues(self, key: Hashable) -> bool:
        """Return whether work with this key has outlived its gang and may still succeed."""
        if self._left is None or self._left[0] != key:
            return False
        future = self._left[1]
        return not future.done() or future.exception() is None

    def discard(self) -> None:
        """Wait for the end of the work that has outlived its gang, which somebody has cancelled."""
        left, self._left = self._left, None
        if left is not None:
            left[1].exception()

    def _begin(self, cause: str = "engines") -> tuple[Phase, str]:
        self._gpus.stops(cause)
        self._failures.parked()
        self._board.update(**self._failures.counts())
        return self._board.get().phase, utc_time()

    def _end(self, phase: Phase) -> None:
        log.info("the trainers are no longer parked")
        self._board.update(phase=phase, message="", waiting="")
        self._gpus.goes_on()

    def _report(self, reason: str, since: str) -> None:
        text = f"waiting since {since}: {reason}"
        if self._board.get().waiting != text:
            log.warning("%s", text)
            phase = self._board.get().phase
            if phase != Phase.SUSPENDING:
                began = phase in (Phase.TRAINING, Phase.RECOVERING)
                phase = Phase.RECOVERING if began else Phase.STARTING
            self._board.update(phase=phase, message=text, waiting=text)

    def _suspend_if_requested(self) -> None:
        """Suspend the job; the checkpoint was saved when the trainers were parked."""
        status = self._board.get()
        if status.suspend_requested:
            message = f"checkpoint of step {status.last_checkpoint or 0} is complete"
            self._board.update(phase=Phase.SUSPENDED, message=message, waiting="")
            self.wait_until_resumed()
            self._gpus.stops("engines")
            self._board.update(phase=Phase.RECOVERING)

    def _beside_gang(self, work: Callable[[], _T], key: Hashable) -> _T:
        """Run work in a thread, so that the end of the gang is noticed meanwhile."""
        future: Future[_T] = self._take(key) or _in_thread(work)
        failed = self._wait(future)
        if not future.done():
            self._left = (key, future) if key is not None else None
        if failed is not None:
            raise failed
        if not future.done() or future.exception() is not None:
            self._trainers.check()  # the death may be the reason of the error
        return future.result()

    def _wait(self, work: "Future[Any]") -> GangError | LeavingError | None:
        """Wait for the work, a death or a departure; return the error that ended the wait, if one did.

        This may be the error of a call in the background that ended the gang.
        """
        notices = self._departure.notices
        died, beside = self._trainers.died, list(self._background())
        while not (work.done() or died.done()):
            try:
                self._departure.check()
            except LeavingError as leaving:
                return leaving
            for future in [future for future in beside if future.done()]:
                beside.remove(future)
                error = future.exception()
                if isinstance(error, GangError):
                    return error
            wait([work, died, *beside, *notices], return_when=FIRST_COMPLETED)
        return None

    def _take(self, key: Hashable) -> "Future[Any] | None":
        if key is None or not self.continues(key):
            return None
        left, self._left = self._left, None
        return left[1] if left else None


def _in_thread(work: Callable[[], _T]) -> "Future[_T]":
    """Run work in a thread of its own: threads of a pool may still be busy with the work of an old gang."""
    future: Future[_T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - the waiting thread raises it
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="engine-work").start()
    return future
