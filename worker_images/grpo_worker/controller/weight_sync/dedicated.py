"""Weight synchronizer for trainers and engines that have GPUs of their own."""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from grpo_operator.api.v1alpha1.model import WeightSyncSpec
from grpo_operator.api.weight_path import WeightPath
from grpo_worker.common.clock import SYSTEM_CLOCK, Clock
from grpo_worker.controller.weight_sync.base import BaseSynchronizer
from grpo_worker.controller.weight_sync.synchronizer import METRIC_PREFIX, Engines, PushResult, Trainers
from grpo_worker.metrics.timing import StepTimer
from grpo_worker.rollout.engine_pool import SyncError, Target
from grpo_worker.weightsync.protocol.version import Version

log = logging.getLogger(__name__)


class DedicatedSynchronizer(BaseSynchronizer):
    """Sends each version directly where it can, and always stages it for engines that join late."""

    def __init__(
        self,
        trainers: Trainers,
        engines: Engines,
        path: WeightPath,
        settings: WeightSyncSpec,
        hang_seconds: float,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        super().__init__(trainers, engines, path, settings, hang_seconds, clock)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights")
        self._pushed: Version | None = None
        self._settled = False  # whether enough engines were seen to serve the pushed version

    def before_trainers_start(self, report: Callable[[str], None]) -> None:
        """Do nothing: the engines need none of the trainers' GPUs."""

    def after_trainers_start(self) -> None:
        """Forget the previous gang; its last version may still wait for engines in the thread."""
        super().after_trainers_start()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights")
        self._pushed, self._settled = None, False

    def push(self, version: Version) -> "Future[PushResult]":
        """Make the trainers' weights ``version``: directly where possible, and staged for other engines."""
        self._pushed, self._settled = version, False
        delivery = self._deliver(version)
        digests = self._trainers.begin("publish_weights", version, self._engines.fp8, self._deltas)
        target = Target(version, self._trainers.sources(), delivery.gang)
        if delivery.complete and self._engines.serves(version):
            self._settle()
        return self._thread.submit(self._serve_staged, target, digests, delivery.metrics)

    def after_push(self, pushed: "Future[PushResult]") -> None:
        """Wait for engines that did not receive a direct transfer.

        The others generate while the version is staged.
        """
        if not self._settled:
            pushed.result()
            self._settle()

    def _settle(self) -> str:
        """Record whether enough engines serve the pushed version; return the shortage, if there is one."""
        if self._pushed is None or self._settled:
            return ""
        shortage = self._engines.shortage(self._pushed)
        if not shortage:
            self._settled, self.served = True, self._pushed
        return shortage

    def _serve_staged(
        self, target: Target, digests: Callable[[], list[Any]], metrics: dict[str, float]
    ) -> PushResult:
        """Wait until the version is staged, and bring the engines to it that do not serve it yet."""
        started = self._clock.now()
        staged = digests()
        metrics[f"{METRIC_PREFIX}publish"] = self._clock.now() - started
        try:
            metrics |= self._engines.serve(target, self._pool_timeout)
        except SyncError as error:  # the version is staged; engines that come back fetch it
            log.warning("%s", error)
        return PushResult(staged, metrics)

    def before_generation(self, timer: StepTimer) -> None:
        """Check that enough engines serve the pushed version."""
        shortage = self._settle()
        if shortage:
            raise SyncError(shortage)

    def forget_engines(self) -> None:
        """Look again whether enough engines serve."""
        self._settled = False

    def before_training(self, timer: StepTimer) -> None:
        """Do nothing: the trainers need none of the engines' GPUs."""
