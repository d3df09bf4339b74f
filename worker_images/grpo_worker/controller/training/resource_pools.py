"""Static resource pools: Ray placement groups on the nodes that advertise the resource of a pool."""

import logging
import time

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

log = logging.getLogger(__name__)
WAIT_LOG_SECONDS = 30.0


class ResourcePoolManager:
    """Reserves the pool of a role. Pods advertise ``{"trainer": ranks}``, so pools cannot mix."""

    def __init__(self) -> None:
        self._groups: dict[str, PlacementGroup] = {}

    def acquire(self, resource: str, ranks: int, timeout: float, gpus: int = 0) -> PlacementGroup:
        """Reserve one bundle for each rank, all or none; wait for replaced pods to register.

        ``gpus``: GPUs of each rank. Raises TimeoutError with the number of registered ranks if some are
        missing after ``timeout`` seconds.
        """
        bundle = {resource: 1.0} | ({"GPU": float(gpus)} if gpus else {})
        group = placement_group([bundle] * ranks, strategy="PACK")
        started = time.monotonic()
        while not group.wait(timeout_seconds=WAIT_LOG_SECONDS):
            waited = time.monotonic() - started
            registered = ray.cluster_resources().get(resource, 0)
            message = f"pool {resource}: {registered:.0f} of {ranks} ranks registered after {waited:.0f} s"
            if waited > timeout:
                remove_placement_group(group)
                raise TimeoutError(message)
            log.info(message)
        self._groups[resource] = group
        return group

    def release(self, resource: str) -> None:
        """Remove the pool's reservation, if it has one."""
        group = self._groups.pop(resource, None)
        if group is not None:
            remove_placement_group(group)
