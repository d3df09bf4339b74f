"""One level-based reconcile for each kind: observe, decide, apply, report."""

from datetime import UTC, datetime
from typing import Any

from pydantic import ValidationError

from grpo_operator.api.base import Device
from grpo_operator.api.errors import describe
from grpo_operator.api.grpojob import GRPOJobSpec, GRPOJobStatus
from grpo_operator.api.rolloutpool import RolloutPoolSpec
from grpo_operator.api.status import LayoutStatus, Phase
from grpo_operator.apply.cache import Cache
from grpo_operator.apply.probe import PodProbe
from grpo_operator.apply.prober import Prober
from grpo_operator.apply.writer import Writer
from grpo_operator.kuberay_client.models import RayClusterStatus
from grpo_operator.plan import decision, names
from grpo_operator.plan.admission import Claim, waiting
from grpo_operator.plan.feasibility import infeasible
from grpo_operator.plan.job_status import job_status, layout_status, refused_status, settled_layout
from grpo_operator.plan.needs import pod_needs
from grpo_operator.plan.observed import Observed
from grpo_operator.plan.pool_status import pool_status, unowned_status
from grpo_operator.plan.resolve import RefusedError, resolve, with_layout
from grpo_operator.plan.topology import Leaves, assign, free_nodes
from grpo_operator.render import children, policies
from grpo_operator.render.settings import OperatorSettings

MANAGER = "rl.grpo.dev/grpo-operator"
_NO_KUBERAY = "the API server knows no RayCluster of ray.io/v1: install KubeRay 1.6; the job starts then"


class Reconciler:
    """Brings one object's children and status to what its spec and the cluster ask for."""

    def __init__(
        self, cache: Cache, writer: Writer, probe: PodProbe, prober: Prober, settings: OperatorSettings
    ) -> None:
        self._cache = cache
        self._writer = writer
        self._probe = probe
        self._prober = prober
        self._settings = settings
        self._waiting: dict[tuple[str, str], str] = {}

    async def job(self, job: dict[str, Any]) -> None:
        """Reconcile one GRPOJob."""
        if job["metadata"].get("deletionTimestamp"):
            return  # owner references take the children along
        if job["spec"].get("managedBy", MANAGER) != MANAGER:
            return
        if self._leftover(job):
            return  # the cluster of a deleted job of this name is still going away
        try:
            spec = GRPOJobSpec.model_validate(job["spec"])
        except ValidationError as error:
            await self._report(job, refused_status(job, "InvalidSpec", describe(error), _now()))
            return
        pool = self._pool_spec(job, spec)
        try:
            layout = self._layout(job, spec, pool)
        except RefusedError as error:
            await self._report(job, refused_status(job, error.reason, str(error), _now()))
            return
        if not self._cache.kuberay and not decision.is_terminal(job.get("status") or {}):
            await self._report(job, refused_status(job, "KubeRayMissing", _NO_KUBERAY, _now(), waits=True))
            return
        queued = self._waiting.get(_key(job))
        if queued:
            await self._report(job, refused_status(job, "WaitingForCapacity", queued, _now(), waits=True))
            return
        observed = self._observe(job)
        status = job_status(job, spec, layout, pool.replicas, observed, _now())
        await self._report(job, status)
        spec = with_layout(spec, layout)
        await self._apply_children(job, spec, pool, observed)
        await self._pool_report(job, pool, observed)
        await self._tell_controller(spec, observed)
        await self._expire(job, spec)

    async def pool(self, pool: dict[str, Any]) -> None:
        """Reconcile a RolloutPool that no job owns; the others are reported with their job."""
        if names.JOB_LABEL not in (pool["metadata"].get("labels") or {}):
            await self._writer.status("rolloutpools", pool, unowned_status(pool, _now()))

    def admit(self) -> None:
        """Work out which jobs must wait; before each round, so that all its jobs see the same."""
        claims = [claim for claim in map(self._claim, self._cache.jobs.values()) if claim]
        if all(claim.holds for claim in claims):
            self._waiting = {}
        else:
            leaving = self._cache.nodes_of_all_but({claim.key for claim in claims})
            self._waiting = waiting(claims, list(self._cache.nodes.values()), leaving)

    def _claim(self, job: dict[str, Any]) -> Claim | None:
        """What a job asks of the cluster; None for one that is ended, suspended, queued or invalid."""
        key = _key(job)
        if decision.is_terminal(job.get("status") or {}) or job["metadata"].get("deletionTimestamp"):
            return None
        try:
            spec = GRPOJobSpec.model_validate(job["spec"])
        except ValidationError:
            return None
        if spec.suspend or spec.scheduling.queue_name or spec.managed_by != MANAGER:
            return None
        needs = pod_needs(spec, self._pool_spec(job, spec).replicas)
        cluster = self._cache.ray_clusters.get(key)
        holds = cluster is not None and not cluster["spec"].get("suspend")
        return Claim(key, job["metadata"]["creationTimestamp"], holds, needs)

    def _leftover(self, job: dict[str, Any]) -> bool:
        meta = job["metadata"]
        cluster = self._cache.ray_clusters.get((meta["namespace"], meta["name"]))
        if cluster is None:
            return False
        owners = cluster["metadata"].get("ownerReferences") or []
        return all(owner["uid"] != meta["uid"] for owner in owners)

    def _pool_spec(self, job: dict[str, Any], spec: GRPOJobSpec) -> RolloutPoolSpec:
        """The owned RolloutPool's spec (it may have been scaled), or the job's template."""
        meta = job["metadata"]
        owned = self._cache.pools.get((meta["namespace"], names.rollout_pool(meta["name"])))
        return RolloutPoolSpec.model_validate(owned["spec"]) if owned else spec.rollout.template

    def _observe(self, job: dict[str, Any]) -> Observed:
        key = _key(job)
        cluster = self._cache.ray_clusters.get(key)
        reports = self._prober.reports(key)
        return Observed(
            RayClusterStatus.model_validate(cluster.get("status") or {}) if cluster else None,
            self._cache.pods_of(*key),
            reports.progress,
            reports.agents,
        )

    def _layout(self, job: dict[str, Any], spec: GRPOJobSpec, pool: RolloutPoolSpec) -> LayoutStatus:
        """The layout. Raises RefusedError for a job that must not get pods; once accepted, a job
        is never refused."""
        settled = settled_layout(job)
        if settled:
            return settled
        plan = resolve(spec, pool)
        crowded = infeasible(pod_needs(spec, pool.replicas), list(self._cache.nodes.values()))
        if crowded:
            raise RefusedError(crowded, "Infeasible")
        return layout_status(plan)

    async def _apply_children(
        self, job: dict[str, Any], spec: GRPOJobSpec, pool: RolloutPoolSpec, observed: Observed
    ) -> None:
        suspend = decision.pods_suspended(
            job.get("status") or {}, spec.suspend, observed, spec.cleanup_policy
        )
        namespace, name = job["metadata"]["namespace"], job["metadata"]["name"]
        leaves = self._leaves(job, spec, pool, observed)
        for group, plural, manifest in self._small_children(job, spec, pool, leaves):
            seen = self._cache.children.get((plural, namespace, manifest["metadata"]["name"]))
            await self._writer.child(group, plural, manifest, seen)
        # The cache is left to the watches: an answer kept here could outlive its object.
        await self._writer.child(
            "apis/rl.grpo.dev/v1alpha1",
            "rolloutpools",
            children.owned_pool(job, spec),
            self._cache.pools.get((namespace, names.rollout_pool(name))),
        )
        seen = self._cache.ray_clusters.get((namespace, name))
        if decision.cluster_unwanted(job.get("status") or {}, spec.cleanup_policy):
            if seen:
                await self._writer.delete_ray_cluster(namespace, name)
            return
        cluster = children.ray_cluster(job, spec, pool, self._settings, suspend, leaves)
        await self._writer.ray_cluster(cluster, seen)

    def _leaves(
        self, job: dict[str, Any], spec: GRPOJobSpec, pool: RolloutPoolSpec, observed: Observed
    ) -> Leaves:
        """Leaves of the job's pools, as far as possible those that it has."""
        key, engine = spec.scheduling.topology_key, pool.engine
        if not key or Device.CPU in (spec.trainer.device, engine.device):
            return Leaves()
        before = children.settled_leaves(self._cache.ray_clusters.get(_key(job)))
        taken = self._cache.nodes_of_all_but({_key(job)}) | observed.nodes_of(names.TRAINER)
        free = free_nodes(list(self._cache.nodes.values()), taken, key, engine.gpus_per_node)
        trainers, hosts = spec.trainer.nodes, engine.nodes_per_engine
        return assign(free, trainers, pool.replicas, hosts, before or Leaves())

    def _small_children(
        self, job: dict[str, Any], spec: GRPOJobSpec, pool: RolloutPoolSpec, leaves: Leaves
    ) -> list[tuple[str, str, dict[str, Any]]]:
        """(API group, plural, manifest) of everything but the pool and the RayCluster."""
        services = [children.rollout_service(job, pool), *children.engine_services(job, pool, leaves)]
        found = [("api/v1", "configmaps", children.job_config_map(job, spec))]
        found += [("api/v1", "services", service) for service in services]
        for budget in policies.disruption_budgets(job, spec.trainer.nodes, pool):
            found.append(("apis/policy/v1", "poddisruptionbudgets", budget))
        if spec.scheduling.network_policy:
            policy = policies.network_policy(job, self._settings)
            found.append(("apis/networking.k8s.io/v1", "networkpolicies", policy))
        return found

    async def _pool_report(self, job: dict[str, Any], spec: RolloutPoolSpec, observed: Observed) -> None:
        meta = job["metadata"]
        pool = self._cache.pools.get((meta["namespace"], names.rollout_pool(meta["name"])))
        if pool:
            status = pool_status(pool, spec, meta["name"], observed, _now())
            await self._writer.status("rolloutpools", pool, status)

    async def _tell_controller(self, spec: GRPOJobSpec, observed: Observed) -> None:
        wish = decision.wish_to_suspend(spec.suspend, observed)
        if wish is not None:
            await self._probe.request_suspend(observed.pods, wish)

    async def _expire(self, job: dict[str, Any], spec: GRPOJobSpec) -> None:
        finished, ttl = (job.get("status") or {}).get("finishedAt"), spec.ttl_seconds_after_finished
        if finished is None or ttl is None:
            return
        age = datetime.now(UTC) - datetime.fromisoformat(finished)
        if age.total_seconds() >= ttl:
            await self._writer.delete_job(job)

    async def _report(self, job: dict[str, Any], status: GRPOJobStatus) -> None:
        """Write the status; a changed phase or refusal becomes an event."""
        before = job.get("status") or {}
        was = (before.get("phase"), _stalled(before))
        if not await self._writer.status("grpojobs", job, status):
            return
        after = job["status"]
        if (after.get("phase"), _stalled(after)) != was:
            message = _stalled(after) or _ready_message(after) or str(after["phase"])
            trouble = bool(_stalled(after)) or after["phase"] in (Phase.FAILED, Phase.RECOVERING)
            await self._writer.event(job, str(after["phase"]), message, trouble)


def _key(job: dict[str, Any]) -> tuple[str, str]:
    return job["metadata"]["namespace"], job["metadata"]["name"]


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _condition_message(status: dict[str, Any], kind: str) -> str:
    for condition in status.get("conditions") or []:
        if condition["type"] == kind and condition["status"] == "True":
            return str(condition["message"])
    return ""


def _stalled(status: dict[str, Any]) -> str:
    return _condition_message(status, "Stalled")


def _ready_message(status: dict[str, Any]) -> str:
    return _condition_message(status, "Progressing")
