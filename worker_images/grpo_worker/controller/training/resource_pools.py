"""Static resource pools: Ray placement groups on the nodes that advertise the resource of a pool."""

import logging
from collections.abc import Callable

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from grpo_worker.common.clock import SYSTEM_CLOCK, Clock

log = logging.getLogger(__name__)
_REPORT_SECONDS = 10.0
_POLL_SECONDS = 0.5
_LEAVE_SECONDS = 15.0  # for Ray to notice that the node of a pod without ranks has ended


class ResourcePoolManager:
    """Reserves the pool of a role. Pods advertise ``{"trainer": ranks}``, so pools cannot mix."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._groups: dict[str, PlacementGroup] = {}
        self._leaving = ""  # address of a node whose pod is about to end

    def acquire(
        self, resource: str, ranks: int, gpus: int = 0, report: Callable[[str], None] = log.info
    ) -> PlacementGroup:
        """Reserve one bundle for each rank, all or none; wait for replaced pods to register.

        ``gpus``: GPUs of each rank. ``report``: called repeatedly with the number of registered ranks.
        """
        if self._leaving:
            self._await_leaving()
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

    def avoid(self, address: str) -> None:
        """Let ``acquire`` wait for the end of the node at this address."""
        self._leaving = address

    def _await_leaving(self) -> None:
        """Wait until a node that was about to end has ended: ranks that start there would be lost at once."""
        address, self._leaving = self._leaving, ""
        leaving = {n["NodeID"] for n in ray.nodes() if n["Alive"] and n["NodeManagerAddress"] == address}
        deadline = self._clock.now() + _LEAVE_SECONDS
        while leaving & {n["NodeID"] for n in ray.nodes() if n["Alive"]} and self._clock.now() < deadline:
            self._clock.sleep(_POLL_SECONDS)

    def release(self, resource: str) -> None:
        """Remove the pool's reservation, if it has one."""
        group = self._groups.pop(resource, None)
        if group is not None:
            remove_placement_group(group)
