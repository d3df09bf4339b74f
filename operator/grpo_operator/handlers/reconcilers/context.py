"""What the reconciles of both kinds share."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from kubernetes.client import ApiException

from grpo_operator.api.base import Device, Model
from grpo_operator.api.names import POOL_LABEL, Owner, owner_in_labels
from grpo_operator.api.v1alpha1.rolloutpool import RolloutTemplate
from grpo_operator.api.v1alpha1.scheduling import SchedulingSpec
from grpo_operator.api.v1alpha1.trainer import TrainerSpec
from grpo_operator.apply.agent_secret import AgentSecrets
from grpo_operator.apply.writer import Writer
from grpo_operator.handlers.reconcilers.admission_round import AdmissionRound
from grpo_operator.handlers.reconcilers.orphans import owner_uid
from grpo_operator.kuberay_client.models import RayCluster, RayClusterStatus
from grpo_operator.observe.cache import Cache, key_of
from grpo_operator.observe.pod_client import PodClient
from grpo_operator.observe.pod_poller import PodPoller
from grpo_operator.observe.watched_kinds import WATCHED
from grpo_operator.plan.capacity import unhealthy_nodes
from grpo_operator.plan.capacity.topology import Leaves, assign, free_nodes
from grpo_operator.plan.observed import of_pool
from grpo_operator.plan.planner.resolve import RefusedError
from grpo_operator.plan.status.events import Event
from grpo_operator.render import policies, services
from grpo_operator.render.ray_cluster import settled_leaves
from grpo_operator.settings import OperatorSettings

REFUSALS = (400, 403, 413, 422)
_TYPED = "failed to create typed patch object"  # a wrong type, which the API server answers with 500
_PATHS = {kind.plural: kind.path for kind in WATCHED}


@dataclass(frozen=True, slots=True)
class ReconcileContext:
    """The cache to read, and the tools to write and to ask with."""

    cache: Cache
    writer: Writer
    probe: PodClient
    poller: PodPoller
    settings: OperatorSettings
    admissions: AdmissionRound
    keys: AgentSecrets

    def cluster_status(self, owner: Owner) -> RayClusterStatus | None:
        cluster = self.cache.ray_clusters.get((owner.namespace, owner.name))
        return RayClusterStatus.model_validate(cluster.get("status") or {}) if cluster else None

    def leftover(self, obj: dict[str, Any]) -> bool:
        """Is the RayCluster of this name that of an owner who is gone?

        Raises RefusedError when it belongs to somebody who is not.
        """
        cluster = self.cache.ray_clusters.get(key_of(obj))
        uid = owner_uid(cluster) if cluster else None
        if cluster is None or uid == obj["metadata"]["uid"]:
            return False
        for other in (*self.cache.jobs.values(), *self.cache.pools.values()):
            if other["metadata"]["uid"] == uid:
                name = obj["metadata"]["name"]
                raise RefusedError(
                    f"metadata.name={name}: {other['kind']} {name} has a RayCluster of that name: choose "
                    "another name",
                    "NameTaken",
                )
        return True

    def leaves(
        self, owner: Owner, scheduling: SchedulingSpec, pool: RolloutTemplate | None,
        trainer: TrainerSpec | None, trainer_nodes: set[str],
    ) -> Leaves:  # fmt: skip
        """Leaves of the pools, as far as possible those that they have."""
        key = scheduling.topology_key
        on_cpu = trainer is not None and trainer.device == Device.CPU
        if not key or pool is None or on_cpu or pool.engine.device == Device.CPU:
            return Leaves()
        before = settled_leaves(self.cache.ray_clusters.get((owner.namespace, owner.name)))
        used = self.cache.gpus_of_all_but({owner})
        free = free_nodes(self.cache.nodes, used, trainer_nodes, key, pool.engine.gpus_per_node)
        hosts, trainers = pool.engine.nodes_per_engine, trainer.nodes if trainer else 0
        return assign(free, trainers, pool.replicas, hosts, before or Leaves())

    def pool_children(
        self, owner: dict[str, Any], pool: RolloutTemplate, leaves: Leaves
    ) -> list[tuple[str, dict[str, Any]]]:
        """(plural, manifest) of a rollout pool's small children."""
        found = [services.rollout_service(owner, pool), *services.engine_services(owner, pool, leaves)]
        budget = ("poddisruptionbudgets", policies.rollout_budget(owner, pool))
        return [budget, *(("services", service) for service in found)]

    async def children(self, *wanted: tuple[str, dict[str, Any]]) -> None:
        """Apply children, given as (plural, manifest), where they differ; none needs another."""
        due = [child for child in wanted if self._is_due(*child)]
        await asyncio.gather(*(self._child(plural, manifest) for plural, manifest in due))

    def _is_due(self, plural: str, manifest: dict[str, Any]) -> bool:
        """A budget waits for its pods: over those that are still being made it protects nothing, and costs
        the API server a write for each."""
        if plural != "poddisruptionbudgets" or self.cache.live(plural, key_of(manifest)) is not None:
            return True
        owner, spec = owner_in_labels(manifest), manifest["spec"]
        assert owner is not None
        pods = of_pool(self.cache.pods_of(owner), spec["selector"]["matchLabels"][POOL_LABEL])
        return bool(len(pods) >= spec["minAvailable"])

    async def _child(self, plural: str, manifest: dict[str, Any]) -> None:
        """The cache is left to the watches: an answer kept here could
        outlive its object."""
        seen = self.cache.live(plural, key_of(manifest))
        await self.writer.child(_PATHS[plural], plural, manifest, seen)

    async def ray_cluster(self, cluster: RayCluster) -> None:
        """Apply a RayCluster; its pods wait for their namespace's key."""
        await self.keys.of(cluster.metadata["namespace"])
        seen = self.cache.live("rayclusters", (cluster.metadata["namespace"], cluster.metadata["name"]))
        await self.writer.ray_cluster(cluster, seen)

    async def replace_sick(
        self, owner: dict[str, Any], pods: Iterable[dict[str, Any]], scheduling: SchedulingSpec
    ) -> None:
        """Pods on nodes that somebody marked as sick go; KubeRay makes new ones elsewhere."""
        for pod, why in unhealthy_nodes.to_replace(pods, self.cache.node, scheduling):
            await self.writer.delete_pod(pod)
            await self.writer.event(owner, "NodeUnhealthy", why, True)

    async def applied(self, apply: Awaitable[None]) -> str:
        """Await ``apply``; what the API server said when it refused the manifests themselves, or "".

        Raises what may pass: conflicts, overload, an API server that is away.
        """
        try:
            await apply
        except ApiException as error:
            if error.status not in REFUSALS and _TYPED not in str(error.reason):
                raise
            return f"the API server refuses what this spec leads to: {error.reason}"
        return ""

    async def report(
        self, plural: str, obj: dict[str, Any], status: Model,
        tell: Callable[[dict[str, Any], dict[str, Any]], Event | None],
    ) -> None:  # fmt: skip
        """Write the status; what is worth telling of the change becomes an event."""
        before = obj.get("status") or {}
        if await self.writer.status(plural, obj, status):
            event = tell(before, obj["status"])
            if event:
                await self.writer.event(obj, *event)


def now() -> str:
    """The time as Kubernetes writes it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
