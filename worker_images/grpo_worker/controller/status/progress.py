"""Status of the run, updated by the training loop and served over HTTP."""

import threading
from typing import Any

from grpo_operator.api.messages import ControllerStatus
from grpo_worker.controller.status.profile_orders import ProfileOrders


class ProgressBoard:
    """Thread-safe holder of the latest ControllerStatus, including the request to suspend.

    ``writer``: identity of the job. ``resumes``: times that it was resumed after its end. ``profiles``: what
    the operator has ordered.
    """

    def __init__(self, writer: str = "", resumes: int = 0) -> None:
        self._lock = threading.Condition()
        self._progress = ControllerStatus(writer=writer, resumes=resumes)
        self.profiles = ProfileOrders(lambda reports: self.update(profiles=reports))

    def get(self) -> ControllerStatus:
        """Return the latest status."""
        with self._lock:
            return self._progress

    def update(self, **changes: Any) -> None:
        """Replace fields of the status, given by their Python names."""
        with self._lock:
            self._progress = self._progress.updated(**changes)

    def request_suspend(self, suspend: bool) -> None:
        """Set or clear the request to suspend; the loop acts on it between two steps."""
        with self._lock:
            self._progress = self._progress.updated(suspend_requested=suspend)
            self._lock.notify_all()

    def request_forget_nodes(self, request: str) -> None:
        """Ask the loop to forget which nodes have failed. ``request``: value of the user's annotation."""
        self.update(forget_nodes=request)

    def wait_until_resumed(self) -> None:
        """Block until the request to suspend is cleared."""
        with self._lock:
            self._lock.wait_for(lambda: not self._progress.suspend_requested)
