"""Stand-in for the controller's answer workers: works in the caller's thread, in no virtual time."""

from concurrent.futures import Future
from typing import Any


class InlineWorkers:
    """Calls methods of ``worker`` itself, as WorkerPool does in other processes."""

    def __init__(self, worker: object, count: int = 1) -> None:
        self._worker = worker

    def submit(self, method: str, *arguments: Any) -> Future[Any]:
        """Call ``method``; return its result."""
        done: Future[Any] = Future()
        try:
            done.set_result(getattr(self._worker, method)(*arguments))
        except Exception as error:  # noqa: BLE001 - the caller of the result raises it
            done.set_exception(error)
        return done

    def close(self) -> None:
        """Do nothing."""
