"""How a version gets from the gang to the engines: over a link, or through the agents' memory."""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_worker.controller.training.gang import TrainerGang
from grpo_worker.controller.weight_sync.direct import DirectTransfer
from grpo_worker.rollout.engine_pool import RolloutPool, Target
from grpo_worker.weightsync.transport.rendezvous import TransferError

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
        self._deltas = spec.weight_sync.mode == "delta"
        self._shared = spec.shares_gpus
        backend = spec.weight_sync.link_backend(spec.trainer.device, self._shared)
        self._link = DirectTransfer(trainers, pool, backend, self._timeout) if backend else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights")
        self._published: Target | None = None  # what engines are to take when the GPUs are theirs

    def begin_attempt(self) -> None:
        """The gang is new."""
        self._published = None
        if self._link is not None:
            self._link.begin_attempt()

    def send(self, version: int) -> "Future[Sent]":
        """Make the gang's weights ``version``; returns once ``minAvailable`` engines serve it. The last one
        must have come to its end.

        Those that a link has reached generate while the copy for engines that come late is made; its end is
        the future's, and so are SyncError and GangError when they come after that. Raises both before.
        """
        if self._shared:
            return self._publish(version)
        linked, metrics = self._over_link(version)
        copied = self._trainers.begin("publish_weights", version, self._pool.fp8, self._deltas)
        target = Target(version, self._trainers.sources(), self._link.latest if self._link else "")
        sent = self._thread.submit(self._serve, target, copied, metrics)
        if not (linked and self._pool.serves(version)):
            sent.result()
        return sent

    def _publish(self, version: int) -> "Future[Sent]":
        """Leave the version in the agents' memory, for engines that have no memory of their own just now."""
        started = time.monotonic()
        digests = self._trainers.call("publish_weights", version, self._pool.fp8, self._deltas)
        self._published = Target(version, self._trainers.sources())
        done: Future[Sent] = Future()
        done.set_result(Sent(digests, {f"{_PREFIX}publish": time.monotonic() - started}))
        return done

    def hand_over(self) -> dict[str, float]:
        """Bring the engines, whose turn it is, to what was published; seconds of the parts.

        Raises SyncError.
        """
        assert self._published is not None, "nothing is published"
        linked, metrics = self._over_link(self._published.version)
        name = self._link.latest if linked and self._link else ""
        return metrics | self._pool.serve(replace(self._published, link=name), self._timeout * 4)

    def _serve(self, target: Target, copied: Callable[[], list[Any]], metrics: dict[str, float]) -> Sent:
        started = time.monotonic()
        digests = copied()
        metrics[f"{_PREFIX}publish"] = time.monotonic() - started
        return Sent(digests, metrics | self._pool.serve(target, self._timeout * 4))

    def _over_link(self, version: int) -> tuple[bool, dict[str, float]]:
        """Did all members take it? And seconds of the parts."""
        if self._link is None:
            return False, {}
        self._pool.hold()
        started = time.monotonic()
        try:
            linked, seconds = True, self._link.send(version)
        except TransferError as error:
            linked, seconds = False, {}
            log.warning("version %d goes through the agents' memory: %s", version, error)
        found = {f"{_PREFIX}{part}": value for part, value in seconds.items()}
        found[f"{_PREFIX}link"] = time.monotonic() - started
        found["weight_sync/link_failures"] = float(self._link.failures)
        return linked, found
