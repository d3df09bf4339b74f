"""One level-based reconcile of a GRPOJob: observe, decide, apply, report."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from pydantic import ValidationError

from grpo_operator.api import names
from grpo_operator.api.errors import describe
from grpo_operator.api.names import Owner, owner_in_labels, owner_of
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.rolloutpool import RolloutPoolSpec, RolloutTemplate
from grpo_operator.api.v1alpha1.status import LayoutStatus
from grpo_operator.handlers.reconcilers.admission_round import MANAGER
from grpo_operator.handlers.reconcilers.context import ReconcileContext, now
from grpo_operator.observe.pod_poller import Reports
from grpo_operator.plan import lifecycle
from grpo_operator.plan.capacity.feasibility import infeasible, partly_taken
from grpo_operator.plan.capacity.pod_requests import job_needs
from grpo_operator.plan.compatibility.kuberay import shortcoming
from grpo_operator.plan.observed import Observed
from grpo_operator.plan.planner.resolve import RefusedError, check_reference, resolve, with_layout
from grpo_operator.plan.status.events import job_event
from grpo_operator.plan.status.grpojob import job_status, layout_status, refused_status, settled_layout
from grpo_operator.plan.status.rolloutpool import pool_status
from grpo_operator.render import config_map, policies
from grpo_operator.render.ray_cluster import job_cluster


@dataclass(frozen=True, slots=True)
class Engines:
    """A job's rollout pool: its ``owner`` is the job, or the RolloutPool that it refers to."""

    owner: Owner
    pool: RolloutTemplate
    own: bool


class WaitError(RefusedError):
    """The job gets no pod yet; it will when something else changes."""


class JobReconciler:
    """Brings one job's children and status to what its spec and the cluster ask for."""

    def __init__(self, context: ReconcileContext) -> None:
        self._kit = context

    async def reconcile(self, job: dict[str, Any]) -> None:
        """Reconcile one GRPOJob."""
        if job["metadata"].get("deletionTimestamp"):
            return  # owner references take the children along
        if job["spec"].get("managedBy", MANAGER) != MANAGER:
            return
        try:
            if self._kit.leftover(job):
                return  # the cluster of a deleted job of this name is still going away
            spec = GRPOJobSpec.model_validate(job["spec"])
            engines = self._engines(job, spec)
            layout = self._layout(job, spec, engines)
            self._check_turn(job, spec, engines)
        except ValidationError as error:
            await self._refuse(job, "InvalidSpec", describe(error))
        except RefusedError as error:
            await self._refuse(job, error.reason, str(error), isinstance(error, WaitError))
        else:
            await self._run(job, with_layout(spec, layout), layout, engines)

    async def _run(
        self, job: dict[str, Any], spec: GRPOJobSpec, layout: LayoutStatus, engines: Engines
    ) -> None:
        observed = self._observe(job, engines)
        blocked = await self._kit.applied(self._apply(job, spec, engines, observed))
        status = job_status(job, spec, layout, engines.pool.replicas, observed, now(), blocked)
        await self._kit.report("grpojobs", job, status, job_event)
        if engines.own:
            await self._pool_report(job, observed)
        await self._kit.replace_sick(job, observed.pods, spec.scheduling)
        wish = lifecycle.wish_to_suspend(spec.suspend, observed)
        if wish is not None:
            await self._kit.probe.request_suspend(observed.pods, wish)
        await self._expire(job, spec)

    async def _refuse(self, job: dict[str, Any], reason: str, message: str, waits: bool = False) -> None:
        if lifecycle.is_terminal(job.get("status") or {}):
            return  # how it ended stays
        status = refused_status(job, reason, message, now(), waits)
        await self._kit.report("grpojobs", job, status, job_event)

    def _engines(self, job: dict[str, Any], spec: GRPOJobSpec) -> Engines:
        """The job's rollout pool. Raises RefusedError."""
        owner, reference = owner_of(job), spec.rollout.pool_ref
        if reference:
            return self._referred(job, reference.name)
        assert spec.rollout.template is not None
        owned = self._kit.cache.pools.get((owner.namespace, names.rollout_pool(owner.name)))
        if owned is None:
            return Engines(owner, spec.rollout.template, True)
        if owner_in_labels(owned) is None:
            raise RefusedError(
                f"metadata.name={owner.name}: a RolloutPool {names.rollout_pool(owner.name)} that belongs to "
                "no job exists, and this job's own would have that name: choose another name",
                "NameTaken",
            )
        return Engines(owner, RolloutPoolSpec.model_validate(owned["spec"]), True)

    def _referred(self, job: dict[str, Any], name: str) -> Engines:
        namespace = job["metadata"]["namespace"]
        pool = self._kit.cache.pools.get((namespace, name))
        if pool is None and lifecycle.is_terminal(job.get("status") or {}):
            return Engines(Owner("RolloutPool", namespace, name), RolloutTemplate(), False)
        if pool is None:
            raise WaitError(
                f"spec.rollout.poolRef.name={name}: namespace {namespace} has no such RolloutPool: create it",
                "PoolNotFound",
            )
        belongs = owner_in_labels(pool)
        if belongs:
            raise RefusedError(
                f"spec.rollout.poolRef.name={name}: this pool belongs to GRPOJob {belongs.name}: name a "
                "RolloutPool that you created",
                "PoolOwned",
            )
        return Engines(owner_of(pool), RolloutPoolSpec.model_validate(pool["spec"]), False)

    def _layout(self, job: dict[str, Any], spec: GRPOJobSpec, engines: Engines) -> LayoutStatus:
        """The layout. Raises RefusedError for a job that must not get pods; once accepted, a job
        is never refused."""
        settled = settled_layout(job)
        if settled:
            return settled
        if isinstance(engines.pool, RolloutPoolSpec) and not engines.own:
            check_reference(spec, engines.pool)
        plan = resolve(spec, engines.pool)
        nodes, trainer = self._kit.cache.nodes, spec.trainer
        crowded = infeasible(job_needs(spec, engines.pool if engines.own else None), nodes)
        if spec.shares_gpus:
            crowded = crowded or partly_taken(trainer.gpus_per_node, trainer.node_selector, nodes)
        if crowded:
            raise RefusedError(crowded, "Infeasible")
        return layout_status(plan)

    def _check_turn(self, job: dict[str, Any], spec: GRPOJobSpec, engines: Engines) -> None:
        """Raises WaitError while KubeRay, the pool or the nodes are not there for this job."""
        if lifecycle.is_terminal(job.get("status") or {}):
            return
        lacking = shortcoming(self._kit.cache.kuberay, spec.upgrade_strategy)
        if lacking:
            raise WaitError(lacking[1], lacking[0])
        owner = owner_of(job)
        if self._kit.cache.crds_lack and self._kit.cluster_status(owner) is None:
            raise WaitError(self._kit.cache.crds_lack, "CrdTooOld")
        if not engines.own and not spec.suspend:
            writer = self._kit.admissions.writer(engines.owner)
            if writer is not None and writer != owner:
                raise WaitError(
                    f"RolloutPool {engines.owner.name} takes its weights from GRPOJob {writer.name}: waiting "
                    "for that job to end or to be suspended",
                    "WaitingForPool",
                )
        queued = self._kit.admissions.waits(owner)
        if queued:
            raise WaitError(queued, "WaitingForCapacity")

    def _observe(self, job: dict[str, Any], engines: Engines) -> Observed:
        owner, cache = owner_of(job), self._kit.cache
        reports, theirs = self._kit.poller.reports(owner), Reports()
        if not engines.own:
            theirs = self._kit.poller.reports(engines.owner)
        return Observed(
            self._kit.cluster_status(owner),
            cache.pods_of(owner),
            reports.progress,
            reports.agents | theirs.agents,
            () if engines.own else cache.pods_of(engines.owner),
        )

    async def _apply(
        self, job: dict[str, Any], spec: GRPOJobSpec, engines: Engines, observed: Observed
    ) -> None:
        context, owner, status = self._kit, owner_of(job), job.get("status") or {}
        suspend = lifecycle.pods_suspended(status, spec.suspend, observed, spec.cleanup_policy)
        trainers = observed.nodes_of(names.TRAINER)
        own = engines.pool if engines.own else None
        alone = None if spec.mode == "colocated" else own  # engines that need nodes of their own
        leaves = context.leaves(owner, spec.scheduling, alone, spec.trainer, trainers)
        service = engines.owner.rollout_service
        # First what takes longest to come up; pods wait for their ConfigMap.
        queued = spec.scheduling.queue_name is not None
        if not lifecycle.cluster_unwanted(status, spec.cleanup_policy, suspend, queued):
            await context.ray_cluster(job_cluster(job, spec, own, context.settings, suspend, leaves))
        elif context.cache.ray_clusters.get((owner.namespace, owner.name)):
            await context.writer.delete_ray_cluster(owner.namespace, owner.name)
        wanted = [
            ("configmaps", config_map.job_config_map(job, spec, service, engines.pool)),
            ("poddisruptionbudgets", policies.trainer_budget(job, spec.trainer.nodes)),
        ]
        if spec.scheduling.network_policy:
            friends = None if engines.own else {"matchLabels": engines.owner.label}
            wanted.append(("networkpolicies", policies.network_policy(job, context.settings, friends)))
        if own:
            wanted += context.pool_children(job, own, leaves)
        if own and spec.rollout.template:
            wanted.append(("rolloutpools", config_map.owned_pool(job, spec, spec.rollout.template)))
        await context.children(*wanted)

    async def _pool_report(self, job: dict[str, Any], observed: Observed) -> None:
        owner = owner_of(job)
        pool = self._kit.cache.pools.get((owner.namespace, names.rollout_pool(owner.name)))
        if pool:
            spec = RolloutPoolSpec.model_validate(pool["spec"])
            status = pool_status(pool, spec, owner, observed, owner.name, now())
            await self._kit.writer.status("rolloutpools", pool, status)

    async def _expire(self, job: dict[str, Any], spec: GRPOJobSpec) -> None:
        finished, ttl = (job.get("status") or {}).get("finishedAt"), spec.ttl_seconds_after_finished
        if finished is None or ttl is None:
            return
        age = datetime.now(UTC) - datetime.fromisoformat(finished)
        if age.total_seconds() >= ttl:
            await self._kit.writer.delete_job(job)
