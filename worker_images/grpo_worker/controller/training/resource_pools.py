"""Static resource pools: Ray placement groups on the nodes that advertise the resource of a pool."""

import logging
from collections.abc import Callable

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from grpo_worker.common.clock import SYSTEM_CLOCK, Clock

log = logging.getLogger(__name__)
_REPORT_SECONDS = 10.0


class ResourcePoolManager:
    """Reserves the pool of a role. Pods advertise ``{"trainer": ranks}``, so pools cannot mix."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._groups: dict[str, PlacementGroup] = {}

    def acquire(
        self, resource: str, ranks: int, gpus: int = 0, report: Callable[[str], None] = log.info
    ) -> PlacementGroup:
        """Reserve one bundle for each rank, all or none; wait for replaced pods to register.

        ``gpus``: GPUs of each rank. ``report``: called repeatedly with the number of registered ranks.
        """
        bundle = {resource: 1.0} | ({"GPU": float(gpus)} if gpus else {})
        group = placement_group([bundle] * ranks, strategy="PACK")
        self._groups[resource] = group
        started = self._clock.now()
        while not group.wait(timeout_seconds=_REPORT_SECONDS):
            waited = self._clock.now() - started
            registered = ray.cluster_resources().get(resource, 0)
            message = f"pool {resource}: {registered:.0f} of {ranks} ranks registered after {waited:.0f} s"
            log.info(message)
            report(message)
        return group

    def release(self, resource: str) -> None:
        """Remove the pool's reservation, if it has one."""
        group = self._groups.pop(resource, None)
        if group is not None:
            remove_placement_group(group)
