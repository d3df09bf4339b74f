"""One level-based reconcile of a RolloutPool that belongs to no job."""

from typing import Any

from pydantic import ValidationError

from grpo_operator.api import names
from grpo_operator.api.base import LONGEST_NAME
from grpo_operator.api.errors import describe
from grpo_operator.api.names import Owner, owner_in_labels, owner_of
from grpo_operator.api.v1alpha1.rolloutpool import RolloutPoolSpec
from grpo_operator.handlers.reconcilers.context import ReconcileContext, now
from grpo_operator.plan.capacity.feasibility import infeasible
from grpo_operator.plan.capacity.pod_requests import pool_needs
from grpo_operator.plan.compatibility.kuberay import shortcoming
from grpo_operator.plan.observed import Observed
from grpo_operator.plan.planner.resolve import RefusedError, check_pool
from grpo_operator.plan.status.events import pool_event
from grpo_operator.plan.status.rolloutpool import pool_status, refused_pool
from grpo_operator.render import policies
from grpo_operator.render.ray_cluster import pool_cluster


class PoolReconciler:
    """Brings one pool's children and status to what its spec and the cluster ask for."""

    def __init__(self, context: ReconcileContext) -> None:
        self._kit = context

    async def reconcile(self, pool: dict[str, Any]) -> None:
        """Reconcile one RolloutPool; those of jobs are reported with their job."""
        if owner_in_labels(pool) or pool["metadata"].get("deletionTimestamp"):
            return
        try:
            if self._kit.leftover(pool):
                return  # the cluster of a deleted pool of this name is still going away
            spec = self._checked(pool)
        except ValidationError as error:
            await self._refuse(pool, "InvalidSpec", describe(error))
        except RefusedError as error:
            await self._refuse(pool, error.reason, str(error))
        else:
            queued = self._kit.admissions.waits(owner_of(pool))
            lacking = shortcoming(self._kit.cache.kuberay, spec.upgrade_strategy)
            if lacking:
                await self._refuse(pool, *lacking, waits=True)
            elif queued:
                await self._refuse(pool, "WaitingForCapacity", queued, waits=True)
            else:
                await self._run(pool, spec)

    def _checked(self, pool: dict[str, Any]) -> RolloutPoolSpec:
        name = pool["metadata"]["name"]
        if len(name) > LONGEST_NAME:
            raise RefusedError(
                f"metadata.name={name}: {len(name)} characters, and pods and services derive from it: use at "
                f"most {LONGEST_NAME}"
            )
        spec = RolloutPoolSpec.model_validate(pool["spec"])
        if (pool.get("status") or {}).get("engines"):
            return spec  # it runs: lost nodes do not undo that
        check_pool(spec)
        crowded = infeasible(pool_needs(spec), self._kit.cache.nodes)
        if crowded:
            raise RefusedError(crowded, "Infeasible")
        return spec

    async def _refuse(self, pool: dict[str, Any], reason: str, message: str, waits: bool = False) -> None:
        status = refused_pool(pool, reason, message, now(), waits)
        await self._kit.report("rolloutpools", pool, status, pool_event)

    async def _run(self, pool: dict[str, Any], spec: RolloutPoolSpec) -> None:
        context, owner = self._kit, owner_of(pool)
        writer, pods = context.admissions.writer(owner), context.cache.pods_of(owner)
        reports = context.poller.reports(owner)
        observed = Observed(context.cluster_status(owner), pods, None, reports.agents)
        name = writer.name if writer else None
        blocked = await context.applied(self._apply(pool, spec))
        status = pool_status(pool, spec, owner, observed, name, now(), blocked)
        await context.report("rolloutpools", pool, status, pool_event)
        await context.replace_sick(pool, pods, spec.scheduling)
        if writer:
            await self._tell_agents(observed, writer)

    async def _apply(self, pool: dict[str, Any], spec: RolloutPoolSpec) -> None:
        context = self._kit
        leaves = context.leaves(owner_of(pool), spec.scheduling, spec, None, set())
        wanted = context.pool_children(pool, spec, leaves)
        if spec.scheduling.network_policy:
            wanted.append(
                ("networkpolicies", policies.network_policy(pool, context.settings, policies.ANY_JOB))
            )
        await context.children(*wanted)
        await context.ray_cluster(pool_cluster(pool, spec, context.settings, leaves))

    async def _tell_agents(self, observed: Observed, writer: Owner) -> None:
        """Every agent takes weights from the bound job alone; one that restarted must be told again."""
        job = self._kit.cache.owner(writer)
        if job is None:
            return
        wanted = names.writer(job)
        for pod in observed.engine_pods():
            report = observed.agents.get(pod["metadata"]["name"])
            if report is not None and report.get("writer") != wanted:
                await self._kit.probe.set_writer(pod, wanted)
