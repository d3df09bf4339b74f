"""Level-based reconcile of a GRPOJob: observe, decide, apply, report."""

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from pydantic import ValidationError

from grpo_operator.api import names
from grpo_operator.api.errors import describe
from grpo_operator.api.names import Owner, owner_in_labels, owner_of
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.resume_status import ResumedFromStatus
from grpo_operator.api.v1alpha1.rolloutpool import RolloutPoolSpec, RolloutTemplate
from grpo_operator.api.v1alpha1.status import LayoutStatus
from grpo_operator.handlers.reconcilers.admission_round import MANAGER
from grpo_operator.handlers.reconcilers.checkpoint_export import CheckpointExport
from grpo_operator.handlers.reconcilers.context import ReconcileContext, now
from grpo_operator.handlers.reconcilers.store_removal import StoreRemoval
from grpo_operator.observe.pod_poller import Reports
from grpo_operator.plan import lifecycle, resumption
from grpo_operator.plan.accepted import ServedSpecs, is_accepted, spec_of
from grpo_operator.plan.capacity.failing_nodes import (
    avoided_names,
    failing_event,
    forget_request,
    seen_failing,
)
from grpo_operator.plan.capacity.feasibility import infeasible, oversized_node
from grpo_operator.plan.capacity.node_outages import eviction_seconds
from grpo_operator.plan.capacity.pod_requests import job_requests
from grpo_operator.plan.compatibility import kuberay_problem
from grpo_operator.plan.exports import export_event, own_pods
from grpo_operator.plan.fork import fork_source, missing_checkpoint
from grpo_operator.plan.gpu_health.strikes import sick_nodes
from grpo_operator.plan.observed import Observed, given_way, own_report, pod_name
from grpo_operator.plan.planner.pool_checks import check_reference, check_waits_for_jobs
from grpo_operator.plan.planner.resolve import RefusedError, resolve
from grpo_operator.plan.planner.settled import with_layout, with_resources
from grpo_operator.plan.status.events import job_event
from grpo_operator.plan.status.grpojob import job_status, layout_status, refused_status, settled_layout
from grpo_operator.plan.status.profiles import acceptance, profile_event, profile_orders
from grpo_operator.plan.status.remaining import total_steps_event
from grpo_operator.plan.status.rolloutpool import pool_status
from grpo_operator.plan.status.stragglers import straggler_event
from grpo_operator.render import config_map, policies
from grpo_operator.render.accepted_clusters import JobSources, Places, accepted_job


@dataclass(frozen=True, slots=True)
class Engines:
    """A job's rollout pool. ``owner``: the job, or the RolloutPool of its poolRef; ``own``: it is the job."""

    owner: Owner
    pool: RolloutTemplate
    own: bool


class WaitError(RefusedError):
    """The job gets no pods yet: it waits for another object to change."""


class JobReconciler:
    """Brings the children and the status of jobs in line with their specs and the cluster."""

    def __init__(self, context: ReconcileContext) -> None:
        self._context = context
        self._store = StoreRemoval(context)
        self._exports = CheckpointExport(context)

    @property
    def _served(self) -> ServedSpecs:
        return self._context.cache.served_specs

    async def reconcile(self, job: dict[str, Any]) -> None:
        """Reconcile one GRPOJob."""
        if job["metadata"].get("deletionTimestamp"):
            await self._store.finish(job)  # the garbage collector deletes the children
            return
        if job["spec"].get("managedBy", MANAGER) != MANAGER or not await self._store.keep_finalizer(job):
            return
        if self._context.cache.crd_problem:  # the status cannot record a resumption, which would never end
            (job["metadata"].get("annotations") or {}).pop(names.RESUME_ANNOTATION, None)
        try:
            if self._context.predecessor_remains(job):
                return  # wait until the RayCluster of a deleted job of this name is gone
            spec = spec_of(GRPOJobSpec, job, is_accepted(job), self._served)
            engines = self._engines(job, spec)
            layout = self._with_images(job, self._layout(job, spec, engines), engines)
            source = fork_source(job, spec, self._context.cache.jobs)
            self._check_may_start(job, spec, engines)
        except ValidationError as error:
            await self._refuse(job, "InvalidSpec", describe(error))
        except RefusedError as error:
            await self._refuse(job, error.reason, str(error), isinstance(error, WaitError))
        else:
            own = with_resources(engines.pool, layout) if engines.own else engines.pool
            if await self._store.keep_finalizer(job, starts=True):
                await self._run(job, with_layout(spec, layout), layout, replace(engines, pool=own), source)

    async def _run(
        self,
        job: dict[str, Any],
        spec: GRPOJobSpec,
        layout: LayoutStatus,
        engines: Engines,
        source: ResumedFromStatus | None,
    ) -> None:
        await self._accept_profile(job)
        observed = self._observe(job, engines)
        requests = job_requests(spec, engines.pool if engines.own else None)
        failing = self._context.failing_nodes(job, observed, requests)
        # The pod template must keep a pod's successor off the node before the pod leaves it.
        kept_off = avoided_names(failing).intersection(avoided_names(seen_failing(job)))
        moves = self._context.moves(owner_of(job), spec.scheduling, kept_off)
        observed = replace(observed, failing_nodes=tuple(failing), held_pods=moves.held)
        blocked = await self._context.refusal(self._apply(job, spec, layout, engines, observed, source))
        status = job_status(job, spec, layout, engines.pool, observed, now(), blocked, source)
        status = await self._exports.follow(job, spec, status)
        events = job_event, total_steps_event, profile_event, straggler_event, failing_event, export_event
        await self._context.write_status("grpojobs", job, status, *events)
        if engines.own:
            await self._write_pool_status(job, observed)
        await self._context.move_pods(job, moves)
        await self._context.delete_unconfirmed(job, observed.pods, eviction_seconds(spec, engines.pool))
        await self._replace_superseded(job, observed)
        suspend = lifecycle.suspend_request(spec.suspend, observed)
        orders = profile_orders(status.profiles, observed)
        forget = forget_request(job, observed)
        if suspend is not None or orders or forget is not None:
            token = await self._context.token(job, layout.images)
            await self._context.pod_client.order(observed.pods, suspend, orders, forget, token)
        await self._expire(job, spec)

    async def _replace_superseded(self, job: dict[str, Any], observed: Observed) -> None:
        """Delete controllers that have given way, so that another one takes over."""
        for pod in given_way(observed.pods, self._context.poller.reports(owner_of(job)).superseded):
            name = pod_name(pod)
            await self._context.writer.delete_pod(pod)
            text = f"{name} is replaced: it had given way to a controller on a node that is cut off"
            await self._context.writer.event(job, "ControllerSuperseded", text, True)

    async def _accept_profile(self, job: dict[str, Any]) -> None:
        """Accept the request of the annotation for profiles, if there is one."""
        change = acceptance(job)
        if change is not None:
            await self._context.writer.annotate("grpojobs", job, change)

    async def _refuse(self, job: dict[str, Any], reason: str, message: str, waits: bool = False) -> None:
        if lifecycle.is_terminal(job.get("status") or {}):
            return  # the outcome of an ended job is final
        status = refused_status(job, reason, message, now(), waits)
        await self._context.write_status("grpojobs", job, status, job_event)

    def _engines(self, job: dict[str, Any], spec: GRPOJobSpec) -> Engines:
        """Return the job's rollout pool. Raises RefusedError."""
        owner, reference = owner_of(job), spec.rollout.pool_ref
        if reference:
            return self._referenced(job, reference.name)
        assert spec.rollout.template is not None
        owned = self._context.cache.pools.get((owner.namespace, names.rollout_pool(owner.name)))
        if owned is None:
            return Engines(owner, spec.rollout.template, True)
        if owner_in_labels(owned) is None:
            raise RefusedError(
                f"metadata.name={owner.name}: RolloutPool {names.rollout_pool(owner.name)} already exists "
                "and belongs to no job, but this job needs that name for its own pool: choose another name",
                "NameTaken",
            )
        return Engines(owner, spec_of(RolloutPoolSpec, owned, is_accepted(job), self._served), True)

    def _referenced(self, job: dict[str, Any], name: str) -> Engines:
        namespace = job["metadata"]["namespace"]
        pool = self._context.cache.pools.get((namespace, name))
        if pool is None and lifecycle.is_terminal(job.get("status") or {}):
            return Engines(Owner("RolloutPool", namespace, name), RolloutTemplate(), False)
        if pool is None:
            raise WaitError(
                f"spec.rollout.poolRef.name={name}: namespace {namespace} has no RolloutPool of that "
                "name: create it",
                "PoolNotFound",
            )
        owner = owner_in_labels(pool)
        if owner:
            raise RefusedError(
                f"spec.rollout.poolRef.name={name}: this pool belongs to GRPOJob {owner.name}: name a "
                "RolloutPool that you created",
                "PoolOwned",
            )
        found = spec_of(RolloutPoolSpec, pool, is_accepted(pool), self._served)
        check_waits_for_jobs(found, name)
        return Engines(owner_of(pool), found, False)

    def _layout(self, job: dict[str, Any], spec: GRPOJobSpec, engines: Engines) -> LayoutStatus:
        """Return the job's layout, from its status if it has one: an accepted job is never refused later.

        Raises RefusedError for a job that must not get pods.
        """
        settled = settled_layout(job)
        if settled:
            return settled
        if isinstance(engines.pool, RolloutPoolSpec) and not engines.own:
            check_reference(spec, engines.pool)
        plan = resolve(spec, engines.pool)
        nodes, trainer = self._context.cache.usable_nodes, spec.trainer
        layout = layout_status(plan)
        own = with_resources(engines.pool, layout) if engines.own else None
        problem = infeasible(job_requests(with_layout(spec, layout), own), nodes)
        if spec.shares_gpus:
            problem = problem or oversized_node(trainer.gpus_per_node, trainer.node_selector, nodes)
        if problem:
            raise RefusedError(problem, "Infeasible")
        return layout

    def _with_images(self, job: dict[str, Any], layout: LayoutStatus, engines: Engines) -> LayoutStatus:
        """Return the layout with the images that the job keeps."""
        pool = None if engines.own else self._context.cache.owner(engines.owner)
        return layout.model_copy(update={"images": self._context.images_of(job, layout.images, pool)})

    def _check_may_start(self, job: dict[str, Any], spec: GRPOJobSpec, engines: Engines) -> None:
        """Raise WaitError while KubeRay, the CRDs, the pool or the nodes are not available for this job."""
        if lifecycle.is_terminal(job.get("status") or {}):
            return
        incompatibility = kuberay_problem(self._context.cache.kuberay_fields, spec.upgrade_strategy)
        if incompatibility:
            reason, message = incompatibility
            raise WaitError(message, reason)
        missing = missing_checkpoint(job, spec, self._context.cache.jobs)
        if missing:
            raise WaitError(missing, "WaitingForCheckpoint")
        owner = owner_of(job)
        if self._context.cache.crd_problem and self._context.cluster_status(owner) is None:
            raise WaitError(self._context.cache.crd_problem, "CrdTooOld")
        if not engines.own and not spec.suspend:
            writer = self._context.admissions.writer(engines.owner)
            if writer is not None and writer != owner:
                raise WaitError(
                    f"RolloutPool {engines.owner.name} receives weights from GRPOJob {writer.name}: waiting "
                    "for that job to end or to be suspended",
                    "WaitingForPool",
                )
        wait_reason = self._context.admissions.wait_reason(owner)
        if wait_reason:
            raise WaitError(wait_reason, "WaitingForCapacity")

    def _observe(self, job: dict[str, Any], engines: Engines) -> Observed:
        owner, cache = owner_of(job), self._context.cache
        reports, pool_reports = self._context.poller.reports(owner), Reports()
        if not engines.own:
            pool_reports = self._context.poller.reports(engines.owner)
        pods, pool_pods = own_pods(cache.pods_of(owner)), () if engines.own else cache.pods_of(engines.owner)
        return Observed(
            self._context.cluster_status(owner),
            pods,
            own_report(job, reports.controller),
            reports.agents | pool_reports.agents,
            pool_pods,
            sick_nodes(cache.gpu_records, owner.text),
            self._context.node_problem((*pods, *pool_pods)),
        )

    async def _apply(
        self,
        job: dict[str, Any],
        spec: GRPOJobSpec,
        layout: LayoutStatus,
        engines: Engines,
        observed: Observed,
        source: ResumedFromStatus | None,
    ) -> None:
        context, owner, status = self._context, owner_of(job), job.get("status") or {}
        resuming = resumption.granted(job, spec)
        suspend = lifecycle.pods_suspended(status, spec.suspend, observed, spec.cleanup_policy, resuming)
        trainers = observed.nodes_of(names.TRAINER)
        own = engines.pool if engines.own else None
        dedicated = None if spec.mode == "colocated" else own  # colocated engines follow the trainers' pods
        leaves = context.leaves(owner, spec.scheduling, dedicated, spec.trainer, trainers)
        service = engines.owner.rollout_service
        failing = context.hostnames(sorted(avoided_names(observed.failing_nodes)))
        places = Places(leaves, context.avoided_hosts(spec.scheduling), failing)
        settings = context.settings.with_images(layout.images or context.settings.images)
        sources = JobSources(spec, engines.pool, engines.own, places)
        accepted = accepted_job(job, sources, settings, suspend, context.record_of(job))
        # The RayCluster first, because its pods take longest to start; they wait for their ConfigMap.
        queued = spec.scheduling.queue_name is not None
        if not lifecycle.cluster_unwanted(status, spec.cleanup_policy, suspend, queued):
            shared = None if engines.own else engines.owner.name
            await context.keys.provide(job, settings.key_scope, shared)
            await context.certificates.provide(job, spec.scheduling.tls, shared)
            await context.apply_ray_cluster(accepted.cluster, owner)
        elif context.cache.ray_clusters.get((owner.namespace, owner.name)):
            await context.writer.delete_ray_cluster(owner.namespace, owner.name)
        config = config_map.job_config_map(
            job, spec, service, engines.pool, accepted.path,
            fork_from=source.folder if source else None, resumes=resumption.times(job, spec),
            accepted=accepted.spec,
        )  # fmt: skip
        budget = policies.trainer_budget(job, spec)
        children = [("configmaps", config), ("poddisruptionbudgets", budget)]
        children += await context.certificates.children(job, spec.scheduling.tls, context.cache.live)
        if spec.scheduling.network_policy:
            pool = None if engines.own else {"matchLabels": engines.owner.label}
            policy = policies.network_policy(job, context.settings, spec.scheduling.egress, pool)
            children.append(("networkpolicies", policy))
        if own:
            children += context.pool_children(job, own, leaves)
        if accepted.pool:
            children.append(("rolloutpools", config_map.owned_pool(job, accepted.pool)))
        await context.apply_children(*children)

    async def _write_pool_status(self, job: dict[str, Any], observed: Observed) -> None:
        owner = owner_of(job)
        pool = self._context.cache.pools.get((owner.namespace, names.rollout_pool(owner.name)))
        if pool:
            spec = spec_of(RolloutPoolSpec, pool, is_accepted(job), self._served)
            status = pool_status(pool, spec, owner, observed, owner.name, now())
            await self._context.write_status("rolloutpools", pool, status)

    async def _expire(self, job: dict[str, Any], spec: GRPOJobSpec) -> None:
        finished, ttl = (job.get("status") or {}).get("finishedAt"), spec.ttl_seconds_after_finished
        if finished is None or ttl is None or resumption.granted(job, spec):
            return
        age = datetime.now(UTC) - datetime.fromisoformat(finished)
        if age.total_seconds() >= ttl:
            await self._context.writer.delete_job(job)
