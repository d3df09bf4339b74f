"""Work of this process in threads beside the calls that it answers."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from grpo_worker.profiling.progress import BACKGROUND, PROGRESS, WRITTEN

_LOOK_SECONDS = 1.0
_T = TypeVar("_T")


def start(work: Callable[[], _T], name: str) -> "Future[_T]":
    """Start work in a thread of its own, which ends with the process."""
    future: Future[_T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - whoever waits for the work raises it
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def join(work: "Future[_T]") -> _T:
    """Wait for work and return its result; what threads write meanwhile is progress of this call."""
    before = BACKGROUND.get().count
    while not wait([work], timeout=_LOOK_SECONDS).done:
        written = BACKGROUND.get().count
        if written > before:
            PROGRESS.add(WRITTEN, written - before)
            before = written
    return work.result()
