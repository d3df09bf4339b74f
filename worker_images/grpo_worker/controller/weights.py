"""How a version gets from the gang to the engines: over a link, or through the agents' memory."""

import logging
import time
from dataclasses import dataclass

from grpo_operator.api.grpojob import GRPOJobSpec
from grpo_worker.controller.trainers import TrainerGang
from grpo_worker.rollout.linked import LinkedPool
from grpo_worker.rollout.pool import RolloutPool, Target
from grpo_worker.weightsync.link.peers import LinkError

log = logging.getLogger(__name__)
_PREFIX = "timing_s/update_weights_"


@dataclass(frozen=True, slots=True)
class Sent:
    """``digests``: of each rank's bytes; ``metrics``: seconds of the parts, and failures of the link."""

    digests: list[str]
    metrics: dict[str, float]


class WeightSender:
    """Brings versions to the pool. Whatever happens to the link, the agents' memory remains."""

    def __init__(self, trainers: TrainerGang, pool: RolloutPool, spec: GRPOJobSpec) -> None:
        self._trainers = trainers
        self._pool = pool
        self._timeout = spec.weight_sync.timeout_seconds
        backend = spec.weight_sync.link_backend(spec.trainer.device)
        self._link = LinkedPool(trainers, pool, backend, self._timeout) if backend else None

    def begin_attempt(self) -> None:
        """The gang is new."""
        if self._link is not None:
            self._link.begin_attempt()

    def send(self, version: int) -> Sent:
        """Make the gang's weights ``version``. Raises SyncError when too few engines take it, and GangError.

        Engines that a link has reached generate already while the agents' copy, for those that come late,
        is made.
        """
        metrics = self._over_link(version)
        started = time.monotonic()
        digests: list[str] = self._trainers.call("publish_weights", version, self._pool.fp8)
        metrics[f"{_PREFIX}publish"] = time.monotonic() - started
        target = Target(version, self._trainers.sources(), self._link.latest if self._link else "")
        return Sent(digests, metrics | self._pool.serve(target, self._timeout * 4))

    def _over_link(self, version: int) -> dict[str, float]:
        if self._link is None:
            return {}
        self._pool.hold()
        seconds: dict[str, float] = {}
        started = time.monotonic()
        try:
            seconds = self._link.send(version)
        except LinkError as error:
            log.warning("version %d goes through the agents' memory: %s", version, error)
        found = {f"{_PREFIX}{part}": value for part, value in seconds.items()}
        found[f"{_PREFIX}link"] = time.monotonic() - started
        return found | {"weight_sync/link_failures": float(self._link.failures)}
