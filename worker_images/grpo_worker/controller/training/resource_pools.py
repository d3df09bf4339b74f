"""Static resource pools: Ray placement groups on the nodes that advertise the resource of a pool."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from grpo_worker.common.clock import SYSTEM_CLOCK, Clock
from grpo_worker.controller.training.gang_nodes import PoolNode, choose, pool_nodes, spares_of
from grpo_worker.controller.training.spare_nodes import WarmSpares

log = logging.getLogger(__name__)
_REPORT_SECONDS = 10.0
_POLL_SECONDS = 0.5
_LEAVE_SECONDS = 15.0  # for Ray to notice that the node of a pod without ranks has ended
_NODE_ID = "ray.io/node-id"  # label that Ray gives to each node


class ResourcePoolManager:
    """Reserves the pool of a role. Pods advertise ``{"trainer": ranks}``, so pools cannot mix.

    A pool may have more nodes than its gang needs. The gang stays on its nodes as long as they live, and
    takes a spare one in the place of a node that is lost.
    """

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._groups: dict[str, PlacementGroup] = {}
        self._unreleased: list[PlacementGroup] = []  # that Ray's head could not remove yet
        self._places: dict[str, list[PoolNode]] = {}  # of each rank of the newest gang
        self._leaving: set[str] = set()  # ids of nodes whose pod is about to end
        self._left = 0.0  # time by which they have ended
        self._failing: frozenset[str] = frozenset()  # addresses
        self._warm: WarmSpares | None = None

    def acquire(
        self, resource: str, ranks: int, gpus: int = 0, report: Callable[[str], None] = log.info
    ) -> PlacementGroup:
        """Reserve one bundle for each rank, all or none; wait for replaced pods to register.

        ``gpus``: GPUs of each rank. ``report``: called repeatedly with the number of registered ranks.
        """
        bundle = {resource: 1.0} | ({"GPU": float(gpus)} if gpus else {})
        started = shown = self._clock.now()
        while True:
            nodes = pool_nodes(_ray_nodes(), resource)
            self._forget_lost(resource, nodes)
            self._remove_unreleased()
            if resource not in self._groups:
                self._reserve(resource, bundle, nodes, ranks)
            group = self._groups.get(resource)
            # The processes of the previous gang may still be ending on the nodes.
            if group is not None and group.wait(timeout_seconds=_POLL_SECONDS):
                return group
            now = self._clock.now()
            if now - shown >= _REPORT_SECONDS:
                shown = now
                report(_waits(resource, sum(node.slots for node in nodes), ranks, now - started))
            if group is None:
                self._clock.sleep(_POLL_SECONDS)

    def avoid(self, address: str) -> None:
        """Let ``acquire`` leave out the node at this address, whose pod is about to end."""
        self._leaving = {node["NodeID"] for node in _ray_nodes() if node["NodeManagerAddress"] == address}
        self._left = self._clock.now() + _LEAVE_SECONDS

    def avoid_failing(self, addresses: frozenset[str]) -> None:
        """Let ``acquire`` take the nodes at these addresses only if there are no others."""
        self._failing = addresses

    def spares(self, resource: str) -> list[PoolNode]:
        """Return the nodes of a pool on which no rank of its newest gang runs."""
        return spares_of(pool_nodes(_ray_nodes(), resource), self._places.get(resource, ()))

    def keep_warm(self, resource: str) -> None:
        """Let the spare nodes of a pool import what ranks import, from now on."""
        if self._warm is None:
            self._warm = WarmSpares(partial(self.spares, resource))

    def release(self, resource: str) -> None:
        """Remove the pool's reservation, if it has one; while Ray's head is away, the next gang does it."""
        group = self._groups.pop(resource, None)
        if group is not None:
            self._unreleased.append(group)
        self._remove_unreleased()

    def _remove_unreleased(self) -> None:
        try:
            while self._unreleased:
                remove_placement_group(self._unreleased[-1])
                self._unreleased.pop()
        except ray.exceptions.RayError as error:
            log.warning("a reservation cannot be removed now: %s", error)

    def _reserve(self, resource: str, bundle: dict[str, float], nodes: list[PoolNode], ranks: int) -> None:
        """Ask Ray for a bundle on the node of each rank, if there are enough nodes."""
        before = {node.id for node in self._places.get(resource, ())}
        leaving = self._leaving if self._clock.now() < self._left else ()
        places = choose(nodes, ranks, before, leaving, self._failing)
        if places is not None:
            labels = [{_NODE_ID: node.id} for node in places]
            group = placement_group([bundle] * ranks, strategy="PACK", bundle_label_selector=labels)
            self._groups[resource], self._places[resource] = group, places

    def _forget_lost(self, resource: str, alive: list[PoolNode]) -> None:
        """Give up a reservation on nodes of which one has ended before Ray could make it."""
        ids = {node.id for node in alive}
        if any(node.id not in ids for node in self._places.get(resource, ())):
            self.release(resource)


def _ray_nodes() -> list[dict[str, Any]]:
    """Return all nodes that Ray knows; none while its head is away."""
    try:
        return list(ray.nodes())
    except ray.exceptions.RayError as error:
        log.warning("Ray's head does not answer: %s", error)
        return []


def _waits(resource: str, registered: int, ranks: int, seconds: float) -> str:
    message = f"pool {resource}: {registered} of {ranks} ranks registered after {seconds:.0f} s"
    log.info(message)
    return message
