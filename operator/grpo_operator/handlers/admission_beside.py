"""Admission rounds beside reconciles of earlier rounds that still run."""

import time
from collections.abc import Callable

from grpo_operator.api.names import Owner
from grpo_operator.handlers.reconcilers.admission_round import AdmissionRound
from grpo_operator.observe.cache import Cache

SETTLE_SECONDS = 2.0  # after a reconcile, until the cache has what it wrote


class AdmissionBeside(AdmissionRound):
    """Admission in which an owner that is being started holds its capacity.

    Its RayCluster may exist although the cache does not show it yet. An older owner that comes in that moment
    must not be admitted to the same nodes, nor another job be bound to the same pool.
    """

    def __init__(self, cache: Cache, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__(cache)
        self._jobs = cache.jobs
        self._now = now
        self._starting: dict[Owner, float] = {}  # with the time until which the owner holds its capacity

    def started(self, owner: Owner) -> None:
        """Note that a reconcile of the owner begins, which reads the admission now."""
        if self._admitted(owner):
            self._starting[owner] = float("inf")

    def ended(self, owner: Owner) -> None:
        """Note that the reconcile of the owner has ended."""
        if owner in self._starting:
            self._starting[owner] = self._now() + SETTLE_SECONDS

    def update(self) -> None:
        """Recompute the admission from the cache and the running reconciles."""
        now = self._now()
        self._starting = {owner: until for owner, until in self._starting.items() if until > now}
        super().update()

    def _holds(self, owner: Owner) -> bool:
        return owner in self._starting or super()._holds(owner)

    def _admitted(self, owner: Owner) -> bool:
        job = self._jobs.get((owner.namespace, owner.name)) if owner.kind == "GRPOJob" else None
        reference = job["spec"]["rollout"].get("poolRef") if job else None
        if reference and self.writer(Owner("RolloutPool", owner.namespace, reference["name"])) != owner:
            return False
        return not self.wait_reason(owner)
