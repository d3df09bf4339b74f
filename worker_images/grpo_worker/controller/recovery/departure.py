"""Departure: pods of the job are about to end, and say so before (SIGTERM of a drain or a preemption)."""

import logging
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Protocol

from grpo_worker.roles.host import RankHost

log = logging.getLogger(__name__)
_OWN = "the controller's pod is being deleted"


class LeavingError(RuntimeError):
    """Pods that run the job end soon: the finished steps must be saved now."""


class Gang(Protocol):
    """The part of TrainerGang that says which training pods are about to end."""

    @property
    def leaving(self) -> "Future[RankHost]":
        """Completed with the first pod that is about to end."""


class Departure:
    """Notices of pods that are about to end, for the training loop. Thread-safe.

    While steps are at stake (``holding``), SIGTERM only asks the loop to save them. At any other time it ends
    the process at once.
    """

    def __init__(self) -> None:
        self._own: Future[None] = Future()
        self._gang: Gang | None = None
        self._holds = False
        self._saves = False

    def listen(self) -> None:
        """Handle SIGTERM from now on; main thread only. Call it again after ``ray.init``, which does too."""
        signal.signal(signal.SIGTERM, self._on_signal)

    def watch(self, gang: Gang) -> None:
        """Heed the training pods as well."""
        self._gang = gang

    @property
    def own(self) -> bool:
        """True if this process itself must end."""
        return self._own.done()

    @property
    def notices(self) -> "list[Future[Any]]":
        """Futures of which one completes when pods are about to end; none while the loop saves."""
        if self._saves:
            return []
        return [self._own, *([self._gang.leaving] if self._gang is not None else [])]

    def check(self) -> None:
        """Raise LeavingError, which names them, if pods are about to end."""
        for notice in self.notices:
            if notice.done():
                raise LeavingError(_OWN if notice is self._own else f"pod {notice.result()} is being deleted")

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Let SIGTERM wait for the loop while the context is open."""
        self._holds = True
        try:
            yield
        finally:
            self._holds = False

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Heed nothing while the context is open: the loop saves because of it."""
        self._saves = True
        try:
            with self.holding():
                yield
        finally:
            self._saves = False

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Let SIGTERM end the process at once while the context is open: nothing is at stake."""
        holds, self._holds = self._holds, False
        try:
            if self.own:
                raise SystemExit(0)
            yield
        finally:
            self._holds = holds

    def _on_signal(self, _number: int, _frame: Any) -> None:
        # A handler runs between two instructions of the main thread, so it must take no lock of that thread.
        if not self._own.done():
            threading.Thread(target=self._request, daemon=True, name="sigterm").start()
        if not self._holds:
            raise SystemExit(0)

    def _request(self) -> None:
        log.warning("SIGTERM: %s", _OWN)
        if not self._own.done():
            self._own.set_result(None)
