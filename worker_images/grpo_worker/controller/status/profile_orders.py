"""Profiles that the operator has ordered, and what became of them."""

import threading
from collections.abc import Callable, Iterable, Sequence

from grpo_operator.api.messages import ProfileOrder, ProfileReport
from grpo_operator.api.v1alpha1.profile_request import ProfileRequest
from grpo_operator.api.v1alpha1.profile_status import MOST_PROFILES, ProfileState
from grpo_worker.common.clock import utc_time


class ProfileOrders:
    """Orders by id, with their reports. Thread-safe.

    Orders wait until somebody takes them: the loop between two steps, or ``on_added`` at once.
    """

    def __init__(self, publish: Callable[[list[ProfileReport]], None]) -> None:
        """``publish``: shows the reports after every change."""
        self._publish = publish
        self._lock = threading.Lock()
        self._waiting: dict[str, ProfileOrder] = {}
        self._reports: dict[str, ProfileReport] = {}
        self._on_added: Callable[[], None] = lambda: None

    def on_added(self, call: Callable[[], None]) -> None:
        """Call a function now and after each new order."""
        self._on_added = call
        call()

    def add(self, orders: Iterable[ProfileOrder]) -> None:
        """Add the orders that are not known yet."""
        with self._lock:
            for order in orders:
                if order.id not in self._reports:
                    self._waiting[order.id] = order
                    self._reports[order.id] = ProfileReport(id=order.id)
            self._changed()
        self._on_added()

    def take(self, accepts: Callable[[ProfileRequest], bool]) -> ProfileOrder | None:
        """Return the oldest waiting order that ``accepts`` allows; it counts as being recorded now."""
        if not self._waiting:  # of every step, and mostly there are none
            return None
        with self._lock:
            order = next((order for order in self._waiting.values() if accepts(order.request)), None)
            if order is not None:
                del self._waiting[order.id]
                self._set(order.id, state=ProfileState.RECORDING, started_at=utc_time())
            return order

    def written(self, identity: str, path: str, files: Sequence[str], message: str = "") -> None:
        """Report the complete files of an order, by their names in ``path``."""
        with self._lock:
            end = utc_time()
            self._set(
                identity, state=ProfileState.WRITTEN, path=path, files=list(files), message=message,
                finished_at=end,
            )  # fmt: skip

    def failed(self, identity: str, message: str) -> None:
        """Report why an order was not recorded."""
        with self._lock:
            self._set(identity, state=ProfileState.FAILED, message=message, finished_at=utc_time())

    def _set(self, identity: str, **changes: object) -> None:
        self._reports[identity] = self._reports[identity].updated(**changes)
        self._changed()

    def _changed(self) -> None:
        """Forget the oldest reports beyond those that a job's status keeps, and show the others."""
        for identity in list(self._reports)[:-MOST_PROFILES]:
            if identity not in self._waiting:
                del self._reports[identity]
        self._publish(list(self._reports.values()))
