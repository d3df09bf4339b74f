"""Weight synchronizer for trainers and engines that have GPUs of their own."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from grpo_operator.api.v1alpha1.model import WeightSyncSpec
from grpo_operator.api.weight_path import WeightPath
from grpo_worker.controller.weight_sync.base import BaseSynchronizer
from grpo_worker.controller.weight_sync.synchronizer import METRIC_PREFIX, Engines, PushResult, Trainers
from grpo_worker.metrics.timing import StepTimer
from grpo_worker.rollout.engine_pool import Target
from grpo_worker.weightsync.protocol.version import Version


class DedicatedSynchronizer(BaseSynchronizer):
    """Sends each version directly where it can, and always stages it for engines that join late."""

    def __init__(
        self, trainers: Trainers, engines: Engines, path: WeightPath, settings: WeightSyncSpec
    ) -> None:
        super().__init__(trainers, engines, path, settings)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights")

    def before_trainers_start(self, report: Callable[[str], None]) -> None:
        """Do nothing: the engines need none of the trainers' GPUs."""

    def push(self, version: Version) -> "Future[PushResult]":
        """Make the trainers' weights ``version``; return once ``minAvailable`` engines serve it.

        Engines that received a direct transfer generate while the version is staged for the others.
        """
        delivery = self._deliver(version)
        digests = self._trainers.begin("publish_weights", version, self._engines.fp8, self._deltas)
        target = Target(version, self._trainers.sources(), delivery.group)
        result = self._thread.submit(self._serve_staged, target, digests, delivery.metrics)
        if not (delivery.complete and self._engines.serves(version)):
            result.result()
        self.served = version
        return result

    def _serve_staged(
        self, target: Target, digests: Callable[[], list[Any]], metrics: dict[str, float]
    ) -> PushResult:
        """Wait until the version is staged, and bring the engines to it that do not serve it yet."""
        started = time.monotonic()
        staged = digests()
        metrics[f"{METRIC_PREFIX}publish"] = time.monotonic() - started
        return PushResult(staged, metrics | self._engines.serve(target, self._pool_timeout))

    def before_generation(self, timer: StepTimer) -> None:
        """Do nothing: the engines serve a version when it was pushed."""

    def before_training(self, timer: StepTimer) -> None:
        """Do nothing: the trainers need none of the engines' GPUs."""
