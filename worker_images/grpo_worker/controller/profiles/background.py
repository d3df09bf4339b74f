"""Profiles that need no boundary of a training step: they are recorded beside the steps."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from grpo_operator.api.messages import ProfileOrder
from grpo_operator.api.v1alpha1.profile_request import ProfileRequest, ProfileTarget, ProfileTool
from grpo_worker.common.errors import one_line
from grpo_worker.controller.status.profile_orders import ProfileOrders
from grpo_worker.profiling.stacks import write_stacks

log = logging.getLogger(__name__)


class Ranks(Protocol):
    """The trainer ranks; see TrainerGang."""

    def beside_on(self, ranks: Sequence[int], method: str, *args: object) -> Callable[[], list[str]]: ...


class Engines(Protocol):
    """The engines of the job; see EngineProfiles."""

    def record(self, identity: str, engines: Sequence[str], steps: int, folder: Path) -> list[str]: ...


def of_steps(request: ProfileRequest) -> bool:
    """Return whether a profile begins and ends between two training steps."""
    return request.target is ProfileTarget.TRAINER and request.tool is not ProfileTool.PY_SPY


class BackgroundProfiles:
    """Records traces of engines and stacks of processes, one order after the other of each target.

    An engine without requests takes no steps, which must not delay the stacks that tell why.
    """

    def __init__(self, folder: Path, orders: ProfileOrders, ranks: Ranks, engines: Engines) -> None:
        """``folder``: of the job's profiles."""
        self._folder = folder
        self._orders = orders
        self._ranks = ranks
        self._engines = engines
        # Their threads start with the first order.
        self._lanes = {target: ThreadPoolExecutor(1, f"profile-{target}") for target in ProfileTarget}

    def start(self) -> None:
        """Record from now on what is ordered, and what waits already."""

        def record() -> None:
            for target, lane in self._lanes.items():
                lane.submit(self._record_waiting, target)

        self._orders.on_added(record)

    def _record_waiting(self, target: ProfileTarget) -> None:
        def fits(request: ProfileRequest) -> bool:
            return request.target is target and not of_steps(request)

        while (order := self._orders.take(fits)) is not None:
            folder = self._folder / order.id
            try:
                files = self._record(order, folder)
            except Exception as error:  # noqa: BLE001 - whatever fails, the user learns why
                log.warning("profile %s failed: %s", order.id, error)
                self._orders.failed(order.id, one_line(error))
            else:
                self._orders.written(order.id, str(folder), files)

    def _record(self, order: ProfileOrder, folder: Path) -> list[str]:
        request = order.request
        if request.target is ProfileTarget.ENGINES:
            steps = request.traced_steps
            return self._engines.record(order.id, request.engines or (), steps, folder)
        if request.target is ProfileTarget.CONTROLLER:
            return [write_stacks(folder, "controller", request.seconds)]
        return self._ranks.beside_on(request.of_ranks, "write_stacks", str(folder), request.seconds)()
