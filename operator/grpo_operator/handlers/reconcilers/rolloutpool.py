"""Level-based reconcile of a RolloutPool that belongs to no job."""

from typing import Any

from pydantic import ValidationError

from grpo_operator.api import names
from grpo_operator.api.base import LONGEST_NAME
from grpo_operator.api.errors import describe
from grpo_operator.api.names import Owner, owner_in_labels, owner_of
from grpo_operator.api.v1alpha1.rolloutpool import RolloutPoolSpec
from grpo_operator.api.v1alpha1.status import SettledImages
from grpo_operator.handlers.reconcilers.context import ReconcileContext, now
from grpo_operator.plan.accepted import is_accepted, spec_of
from grpo_operator.plan.capacity.feasibility import infeasible
from grpo_operator.plan.capacity.pod_requests import pool_requests
from grpo_operator.plan.compatibility import kuberay_problem
from grpo_operator.plan.observed import Observed
from grpo_operator.plan.planner.pool_checks import check_pool
from grpo_operator.plan.planner.resolve import RefusedError
from grpo_operator.plan.planner.resources import completed_pool
from grpo_operator.plan.serving import serving_of
from grpo_operator.plan.status.events import pool_event
from grpo_operator.plan.status.rolloutpool import pool_status, refused_pool, settled_pool_images
from grpo_operator.render import policies
from grpo_operator.render.accepted_clusters import Places, accepted_pool_cluster
from grpo_operator.render.serving import serve_service


class PoolReconciler:
    """Brings the children and the status of pools in line with their specs and the cluster."""

    def __init__(self, context: ReconcileContext) -> None:
        self._context = context

    async def reconcile(self, pool: dict[str, Any]) -> None:
        """Reconcile one RolloutPool. A pool of a job is reconciled with its job."""
        if owner_in_labels(pool) or pool["metadata"].get("deletionTimestamp"):
            return
        try:
            if self._context.predecessor_remains(pool):
                return  # wait until the RayCluster of a deleted pool of this name is gone
            spec = self._check(pool)
        except ValidationError as error:
            await self._refuse(pool, "InvalidSpec", describe(error))
        except RefusedError as error:
            await self._refuse(pool, error.reason, str(error))
        else:
            wait_reason = self._context.admissions.wait_reason(owner_of(pool))
            incompatibility = kuberay_problem(self._context.cache.kuberay_fields, spec.upgrade_strategy)
            if incompatibility:
                await self._refuse(pool, *incompatibility, waits=True)
            elif wait_reason:
                await self._refuse(pool, "WaitingForCapacity", wait_reason, waits=True)
            else:
                await self._run(pool, spec)

    def _check(self, pool: dict[str, Any]) -> RolloutPoolSpec:
        """Return the pool's valid spec. Raises ValidationError or RefusedError."""
        name = pool["metadata"]["name"]
        if len(name) > LONGEST_NAME:
            raise RefusedError(
                f"metadata.name={name}: {len(name)} characters, and names of pods and services derive from "
                f"it: use at most {LONGEST_NAME}"
            )
        spec = completed_pool(
            spec_of(RolloutPoolSpec, pool, is_accepted(pool), self._context.cache.served_specs)
        )
        if (pool.get("status") or {}).get("engines"):
            return spec  # a running pool is not refused when nodes are lost
        check_pool(spec)
        problem = infeasible(pool_requests(spec), self._context.cache.usable_nodes)
        if problem:
            raise RefusedError(problem, "Infeasible")
        return spec

    async def _refuse(self, pool: dict[str, Any], reason: str, message: str, waits: bool = False) -> None:
        status = refused_pool(pool, reason, message, now(), waits)
        await self._context.write_status("rolloutpools", pool, status, pool_event)

    async def _run(self, pool: dict[str, Any], spec: RolloutPoolSpec) -> None:
        context, owner = self._context, owner_of(pool)
        pods = context.cache.pods_of(owner)
        writer = None if spec.serve else context.admissions.writer(owner)
        reports = context.poller.reports(owner)
        moves = context.moves(owner, spec.scheduling)
        observed = Observed(
            context.cluster_status(owner), pods, None, reports.agents,
            node_problem=context.node_problem(pods), held_pods=moves.held,
        )  # fmt: skip
        name = writer.name if writer else None
        images = context.images_of(pool, settled_pool_images(pool))
        blocked = await context.refusal(self._apply(pool, spec, images))
        status = pool_status(pool, spec, owner, observed, name, now(), blocked, images)
        await context.write_status("rolloutpools", pool, status, pool_event)
        await context.move_pods(pool, moves)
        seconds = {names.HEAD: spec.scheduling.eviction_seconds}
        seconds[names.ROLLOUT] = spec.scheduling.eviction_seconds_of(spec)
        await context.delete_unconfirmed(pool, pods, seconds)
        if writer:
            await self._set_writer(pool, images, observed, writer)

    async def _apply(self, pool: dict[str, Any], spec: RolloutPoolSpec, images: SettledImages) -> None:
        context, serving = self._context, serving_of(pool, spec)
        leaves = context.leaves(owner_of(pool), spec.scheduling, spec, None, set())
        children = context.pool_children(pool, spec, leaves)
        children += await context.certificates.children(pool, spec.scheduling.tls, context.cache.live)
        if spec.scheduling.network_policy:
            egress, jobs = spec.scheduling.egress, None if serving else policies.ANY_JOB
            policy = policies.network_policy(pool, context.settings, egress, jobs, serving is not None)
            children.append(("networkpolicies", policy))
        if serving:
            children.append(("services", serve_service(pool, spec, serving)))
        await context.apply_children(*children)
        places = Places(leaves, context.avoided_hosts(spec.scheduling))
        settings = context.settings.with_images(images)
        cluster = accepted_pool_cluster(pool, settings, places, context.record_of(pool))
        await context.keys.provide(pool, images.key_scope)
        if spec.serve and spec.serve.secret_name is None:
            await context.keys.provide_api_key(pool)
        await context.certificates.provide(pool, spec.scheduling.tls)
        await context.apply_ray_cluster(cluster, owner_of(pool))

    async def _set_writer(
        self, pool: dict[str, Any], images: SettledImages, observed: Observed, writer: Owner
    ) -> None:
        """Bind every agent to the job, so that it accepts weights from no other job.

        An agent that has restarted has lost its binding, which its status shows.
        """
        job = self._context.cache.owner(writer)
        if job is None:
            return
        identity = names.writer(job)
        for pod in observed.engine_pods():
            agent = observed.agents.get(pod["metadata"]["name"])
            if agent is not None and agent.writer != identity:
                token = await self._context.token(pool, images)
                await self._context.pod_client.set_writer(pod, identity, token)
