"""Tools shared by the reconcilers of both kinds."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from kubernetes.client import ApiException

from grpo_operator.api.base import Device, Model
from grpo_operator.api.names import PARTS_ANNOTATION, POOL_LABEL, ROLLOUT, Owner, owner_in_labels, owner_of
from grpo_operator.api.v1alpha1.rolloutpool import RolloutTemplate
from grpo_operator.api.v1alpha1.scheduling import SchedulingSpec
from grpo_operator.api.v1alpha1.status import FailingNodeStatus, SettledImages
from grpo_operator.api.v1alpha1.trainer import TrainerSpec
from grpo_operator.apply.pod_certificates import PodCertificates
from grpo_operator.apply.pod_keys import PodKeys
from grpo_operator.apply.writer import Writer
from grpo_operator.handlers.reconcilers.admission_round import AdmissionRound
from grpo_operator.handlers.reconcilers.orphans import owner_uid
from grpo_operator.kuberay_client.models import RayCluster, RayClusterStatus
from grpo_operator.observe.cache import Cache, key_of
from grpo_operator.observe.outage_watch import OutageWatch
from grpo_operator.observe.pod_client import PodClient
from grpo_operator.observe.pod_poller import PodPoller
from grpo_operator.observe.watched_kinds import WATCHED
from grpo_operator.plan.accepted import settled_images
from grpo_operator.plan.capacity import node_outages, unhealthy_nodes
from grpo_operator.plan.capacity.failing_nodes import failing_nodes
from grpo_operator.plan.capacity.feasibility import PodRequest
from grpo_operator.plan.capacity.surplus_engines import engines_to_delete
from grpo_operator.plan.capacity.topology import Leaves, assign, free_nodes
from grpo_operator.plan.gpu_health.node_state import avoided_hosts, hostname
from grpo_operator.plan.observed import Observed, of_pool
from grpo_operator.plan.planner.resolve import RefusedError
from grpo_operator.plan.status.conditions import Problem
from grpo_operator.plan.status.events import Event
from grpo_operator.plan.status.rolloutpool import settled_pool_images
from grpo_operator.render import policies, services
from grpo_operator.render.ray_cluster import settled_leaves
from grpo_operator.settings import OperatorSettings

# HTTP statuses by which the API server rejects a manifest itself: retrying does not help.
REFUSALS = (400, 403, 413, 422)
_TYPED = "failed to create typed patch object"  # a value of a wrong type, which is answered with 500
_TOO_LARGE = "request is too large"  # etcd's answer to more than 1.5 MiB, which becomes a 500
_SMALLER = (
    "an object made from this spec is larger than etcd's limit of 1.5 MiB: make the podTemplates smaller; "
    "that of the engines is repeated for each network leaf"
)
_PATHS = {kind.plural: kind.path for kind in WATCHED}


@dataclass(frozen=True, slots=True)
class ReconcileContext:
    """The cache to read from, and the clients to write and to call pods with."""

    cache: Cache
    writer: Writer
    pod_client: PodClient
    poller: PodPoller
    settings: OperatorSettings
    admissions: AdmissionRound
    keys: PodKeys
    outages: OutageWatch
    certificates: PodCertificates

    def cluster_status(self, owner: Owner) -> RayClusterStatus | None:
        """Return the status of the owner's RayCluster, or None when it does not exist."""
        cluster = self.cache.ray_clusters.get((owner.namespace, owner.name))
        return RayClusterStatus.model_validate(cluster.get("status") or {}) if cluster else None

    def predecessor_remains(self, obj: dict[str, Any]) -> bool:
        """Return whether a deleted owner of the same name still has its RayCluster.

        Raises RefusedError when the RayCluster of this name belongs to an existing object of another kind.
        """
        cluster = self.cache.ray_clusters.get(key_of(obj))
        uid = owner_uid(cluster) if cluster else None
        if cluster is None or uid == obj["metadata"]["uid"]:
            return False
        for other in (*self.cache.jobs.values(), *self.cache.pools.values()):
            if other["metadata"]["uid"] == uid:
                name = obj["metadata"]["name"]
                raise RefusedError(
                    f"metadata.name={name}: {other['kind']} {name} already has a RayCluster of that name: "
                    "choose another name",
                    "NameTaken",
                )
        return True

    def leaves(
        self, owner: Owner, scheduling: SchedulingSpec, pool: RolloutTemplate | None,
        trainer: TrainerSpec | None, trainer_nodes: set[str],
    ) -> Leaves:  # fmt: skip
        """Return the network leaves of both pools; existing assignments are kept as far as possible."""
        key = scheduling.topology_key
        on_cpu = trainer is not None and trainer.device == Device.CPU
        if not key or pool is None or on_cpu or pool.engine.device == Device.CPU:
            return Leaves()
        before = settled_leaves(self.cache.ray_clusters.get((owner.namespace, owner.name)))
        used = self.cache.gpus_of_others({owner})
        # Engines stay in the leaf of a node that may come back.
        pods = of_pool(self.cache.pods_of(owner), ROLLOUT)
        patience = {ROLLOUT: scheduling.eviction_seconds_of(pool)}
        awaited = node_outages.awaited(pods, self.outages.outages(pods), patience)
        nodes = node_outages.as_ready(self.cache.usable_nodes, awaited)
        free = free_nodes(nodes, used, trainer_nodes, key, pool.engine.gpus_per_node)
        hosts, trainers = pool.engine.nodes_per_engine, trainer.pods if trainer else 0
        return assign(free, trainers, pool.replicas, hosts, before or Leaves())

    def avoided_hosts(self, scheduling: SchedulingSpec) -> tuple[str, ...]:
        """Return the hosts in quarantine for sick GPUs that only an affinity keeps the pods off."""
        taints = self.settings.gpu_health.taints
        return avoided_hosts(self.cache.gpu_records, self.cache.nodes, scheduling, taints)

    def failing_nodes(
        self, job: dict[str, Any], observed: Observed, requests: Sequence[PodRequest]
    ) -> list[FailingNodeStatus]:
        """Return the nodes on which ranks of the job have failed, and which of them it avoids."""
        used = self.cache.gpus_of_others({owner_of(job)})
        return failing_nodes(job, observed, requests, self.cache.usable_nodes, used)

    def images_of(
        self, obj: dict[str, Any], accepted: SettledImages | None, pool: dict[str, Any] | None = None
    ) -> SettledImages:
        """Return the images of the pods of a job or pool. ``accepted``: those in its status.

        ``pool``: the shared pool of a job. A new job uses the keys that its pool knows.
        """
        default = self.settings.images
        if pool is not None:
            of_pool = self.images_of(pool, settled_pool_images(pool))
            default = default.model_copy(update={"key_scope": of_pool.key_scope})
        cluster = None if accepted else self.cache.live("rayclusters", key_of(obj))
        return settled_images(accepted, cluster, default)

    async def token(self, owner: dict[str, Any], images: SettledImages | None) -> str:
        """Return the token of calls to the owner's pods. ``images``: those that they have."""
        return await self.keys.token(owner, (images or self.settings.images).key_scope)

    def record_of(self, obj: dict[str, Any]) -> str | None:
        """Return the record of parts of the live RayCluster of a job or pool, or None."""
        annotations = self.cache.ray_clusters.get(key_of(obj), {}).get("metadata", {}).get("annotations")
        return (annotations or {}).get(PARTS_ANNOTATION)

    def pool_children(
        self, owner: dict[str, Any], pool: RolloutTemplate, leaves: Leaves
    ) -> list[tuple[str, dict[str, Any]]]:
        """Return (plural, manifest) of a rollout pool's services and its PodDisruptionBudget."""
        manifests = [services.rollout_service(owner, pool), *services.engine_services(owner, pool, leaves)]
        budget = ("poddisruptionbudgets", policies.rollout_budget(owner, pool))
        return [budget, *(("services", service) for service in manifests)]

    async def apply_children(self, *children: tuple[str, dict[str, Any]]) -> None:
        """Apply the children, given as (plural, manifest), that differ from the cluster.

        They are applied concurrently: none depends on another.
        """
        due = [child for child in children if self._is_due(*child)]
        await asyncio.gather(*(self._apply_child(plural, manifest) for plural, manifest in due))

    def _is_due(self, plural: str, manifest: dict[str, Any]) -> bool:
        """Return whether a child may be applied now: a PodDisruptionBudget waits until its pods exist.

        Before that it protects nothing, and its status costs the API server a write for each new pod.
        """
        if plural != "poddisruptionbudgets" or self.cache.live(plural, key_of(manifest)) is not None:
            return True
        owner, spec = owner_in_labels(manifest), manifest["spec"]
        assert owner is not None
        pods = of_pool(self.cache.pods_of(owner), spec["selector"]["matchLabels"][POOL_LABEL])
        return bool(len(pods) >= spec["minAvailable"])

    async def _apply_child(self, plural: str, manifest: dict[str, Any]) -> None:
        # The answer is not stored in the cache: only watches fill it, or it could outlive its object.
        seen = self.cache.live(plural, key_of(manifest))
        if seen is None:
            await self._check_name(plural, manifest)
        await self.writer.child(_PATHS[plural], plural, manifest, seen)

    async def _check_name(self, plural: str, manifest: dict[str, Any]) -> None:
        """Raise RefusedError if the name of a new child is taken: it would overwrite a foreign object."""
        if await self.writer.is_taken(_PATHS[plural], plural, manifest):
            kind, name = manifest["kind"], manifest["metadata"]["name"]
            raise RefusedError(
                f"{kind} {name} exists already and belongs to somebody else, but this object needs one of "
                f"that name: delete the {kind}, or choose another name",
                "NameTaken",
            )

    async def apply_ray_cluster(self, cluster: RayCluster, owner: Owner) -> None:
        """Apply a RayCluster, whose pods mount Secrets that exist already."""
        pods = self.cache.pods_of(owner)
        groups = {group.group_name: group.replicas for group in cluster.spec.worker_group_specs}
        cluster.delete_workers(engines_to_delete(pods, groups, self.cache.is_usable))
        seen = self.cache.live("rayclusters", (cluster.metadata["namespace"], cluster.metadata["name"]))
        if seen is None:
            await self._check_name("rayclusters", cluster.wire())
        await self.writer.ray_cluster(cluster, seen)

    def moves(
        self, owner: Owner, scheduling: SchedulingSpec, avoided: Iterable[str] = ()
    ) -> unhealthy_nodes.Moves:
        """Return the pods that leave unhealthy nodes, and those that training pods avoid, now."""
        pods, cluster = self.cache.pods_of(owner), self.cluster_status(owner)
        wanted = 1 + cluster.desired_worker_replicas if cluster else len(pods)
        return unhealthy_nodes.moves(pods, wanted, self.cache.node, scheduling, set(avoided))

    async def move_pods(self, owner: dict[str, Any], moves: unhealthy_nodes.Moves) -> None:
        """Delete the pods that leave their nodes; KubeRay recreates them on other nodes."""
        for pod, message in moves.now:
            await self.writer.delete_pod(pod)
            await self.writer.event(owner, "NodeUnhealthy", message, True)

    def hostnames(self, nodes: Iterable[str]) -> tuple[str, ...]:
        """Return the hostnames of nodes, by which an affinity selects them."""
        found = ((name, self.cache.node(name) or {"metadata": {}}) for name in nodes)
        return tuple(hostname(name, node["metadata"].get("labels") or {}) for name, node in found)

    def node_problem(self, pods: Iterable[dict[str, Any]]) -> str:
        """Return a message about nodes of these pods that are not Ready, or ""."""
        outages = self.outages.outages(pods)
        return node_outages.problem(outages.values(), self._partition(outages))

    async def delete_unconfirmed(
        self, owner: dict[str, Any], pods: tuple[dict[str, Any], ...], eviction_seconds: Mapping[str, int]
    ) -> None:
        """Delete the pods on unreachable nodes, which KubeRay then recreates on others.

        ``eviction_seconds``: by pool.
        """
        outages = self.outages.outages(pods)
        if self._partition(outages):
            return
        gone: dict[str, list[str]] = {}
        for pod in node_outages.unconfirmed(pods, outages, eviction_seconds, time.time()):
            await self.writer.delete_pod(pod, confirmed=False)
            gone.setdefault(pod["spec"]["nodeName"], []).append(pod["metadata"]["name"])
        for node, deleted in gone.items():
            text = f"{outages[node].text}: deleted {', '.join(sorted(deleted))} without its confirmation"
            await self.writer.event(owner, "NodeLost", text, True)

    def _partition(self, outages: node_outages.Outages) -> str:
        silent = any(outage.silent for outage in outages.values())
        return node_outages.partition(self.cache.nodes) if silent else ""

    async def refusal(self, apply: Awaitable[None]) -> Problem:
        """Await ``apply`` and return why the manifests themselves cannot be applied, if they cannot.

        Temporary errors are raised: conflicts, overload, an unreachable API server.
        """
        try:
            await apply
        except RefusedError as error:
            return Problem(error.reason, str(error))
        except ApiException as error:
            reason = str(error.reason)
            if _TOO_LARGE in reason:
                return Problem("ApplyRefused", _SMALLER)
            if error.status not in REFUSALS and _TYPED not in reason:
                raise
            text = f"the API server refused an object made from this spec: {error.reason}"
            return Problem("ApplyRefused", text)
        return Problem()

    async def write_status(
        self, plural: str, obj: dict[str, Any], status: Model,
        *events_of: Callable[[dict[str, Any], dict[str, Any]], Event | None],
    ) -> None:  # fmt: skip
        """Write the status if it changed, and the events that ``events_of`` derive from the change."""
        before = obj.get("status") or {}
        if await self.writer.status(plural, obj, status, self.cache.older_statuses.get(plural)):
            for event in filter(None, [event_of(before, obj["status"]) for event_of in events_of]):
                await self.writer.event(obj, *event)


def now() -> str:
    """Return the current time in the format of Kubernetes (RFC 3339, UTC, seconds)."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
