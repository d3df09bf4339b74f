"""Weight synchronizer for trainers and engines that have GPUs of their own."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from grpo_operator.api.v1alpha1.model import WeightSyncSpec
from grpo_operator.api.weight_path import WeightPath
from grpo_worker.controller.config import pool_timeout
from grpo_worker.controller.weight_sync.direct_transfer import Delivery, coordinator_for
from grpo_worker.controller.weight_sync.synchronizer import METRIC_PREFIX, Engines, PushResult, Trainers
from grpo_worker.metrics.timing import StepTimer
from grpo_worker.rollout.engine_pool import Target
from grpo_worker.weightsync.protocol.version import Version


class DedicatedSynchronizer:
    """Sends each version directly where it can, and always stages it for engines that join late."""

    def __init__(
        self, trainers: Trainers, engines: Engines, path: WeightPath, settings: WeightSyncSpec
    ) -> None:
        self._trainers = trainers
        self._engines = engines
        self._deltas = path.delta
        self._direct = coordinator_for(path, trainers, engines, settings.timeout_seconds)
        self._pool_timeout = pool_timeout(settings)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights")
        self.served: Version | None = None

    def before_trainers_start(self, report: Callable[[str], None]) -> None:
        """Do nothing: the engines need none of the trainers' GPUs."""

    def after_trainers_start(self) -> None:
        if self._direct is not None:
            self._direct.after_trainers_start()

    def push(self, version: Version) -> "Future[PushResult]":
        """Make the trainers' weights ``version``; return once ``minAvailable`` engines serve it.

        Engines that received a direct transfer generate while the version is staged for the others.
        """
        delivery = self._direct.deliver(version) if self._direct else Delivery()
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
