"""Construction and direct transfer, which both weight synchronizers share."""

from grpo_operator.api.v1alpha1.model import WeightSyncSpec
from grpo_operator.api.weight_path import Backend, WeightPath
from grpo_worker.common.clock import SYSTEM_CLOCK, Clock
from grpo_worker.controller.config import pool_timeout
from grpo_worker.controller.weight_sync.direct_transfer import Delivery, coordinator_for
from grpo_worker.controller.weight_sync.synchronizer import Engines, Trainers
from grpo_worker.weightsync.protocol.version import Version


class BaseSynchronizer:
    """The two ends of the weight path, and the coordinator of direct transfers if the path has them."""

    def __init__(
        self,
        trainers: Trainers,
        engines: Engines,
        path: WeightPath,
        settings: WeightSyncSpec,
        hang_seconds: float,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """``hang_seconds``: seconds without progress after which a rank counts as hanging.

        Members of a direct transfer give up before that.
        """
        self._trainers = trainers
        self._engines = engines
        self._deltas = path.delta
        self.over_nccl = path.direct is Backend.NCCL
        self._clock = clock
        patience = min(float(settings.patience), hang_seconds)
        self._direct = coordinator_for(path, trainers, engines, patience, clock)
        self._pool_timeout = pool_timeout(settings)
        self.served: Version | None = None

    def after_trainers_start(self) -> None:
        """Forget the links of the previous gang."""
        if self._direct is not None:
            self._direct.after_trainers_start()

    def _deliver(self, version: Version) -> Delivery:
        """Send ``version`` directly; an empty delivery if the path has no direct transfers."""
        return self._direct.deliver(version) if self._direct else Delivery()
