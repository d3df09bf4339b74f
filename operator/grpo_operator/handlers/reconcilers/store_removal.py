"""Deletion of a job with ``checkpoint.deletionPolicy: Delete``: its pods end, then its folder is removed.

A finalizer holds the job until then. The operator mounts no store and has no credentials of one: a pod in the
job's namespace removes the folder.
"""

import logging
import time
from typing import Any

from kubernetes.client import ApiException
from pydantic import ValidationError

from grpo_operator.api import names
from grpo_operator.api.errors import describe
from grpo_operator.api.names import owner_of
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.rolloutpool import RolloutTemplate
from grpo_operator.handlers.reconcilers.context import REFUSALS, ReconcileContext, now
from grpo_operator.handlers.reconcilers.orphans import owner_uid
from grpo_operator.kuberay_client.kube import namespace_ends
from grpo_operator.observe.cache import key_of
from grpo_operator.plan.accepted import spec_of
from grpo_operator.plan.capacity.node_outages import eviction_seconds
from grpo_operator.plan.exports import surplus_exporters
from grpo_operator.plan.store_removal import (
    Step,
    awaited_children,
    changed_finalizers,
    deletes_store,
    is_held,
    next_step,
    removal_event,
    removal_status,
    split,
    state_of,
)
from grpo_operator.render.store_removal import removal_pod

log = logging.getLogger(__name__)
_Job = dict[str, Any]


class StoreRemoval:
    """Sets the finalizer of jobs that exist, and finishes those that are being deleted."""

    def __init__(self, context: ReconcileContext) -> None:
        self._context = context

    async def keep_finalizer(self, job: _Job, starts: bool = False) -> bool:
        """Let the job have the finalizer if its policy says so. ``starts``: its pods come next.

        Return False if the job has changed since it was read.
        """
        finalizers = changed_finalizers(job, starts)
        return finalizers is None or await self._context.writer.set_finalizers("grpojobs", job, finalizers)

    async def finish(self, job: _Job) -> None:
        """Reconcile a job that is being deleted. Without the finalizer, it is the garbage collector's."""
        if not is_held(job):
            return
        if not deletes_store(job):
            await self._release(job, "StoreRetained", "stays: spec.checkpoint.deletionPolicy=Retain")
            return
        spec = _parsed(job)
        writers, remover = split(self._context.cache.pods_of(owner_of(job)))
        await self._end_exports(job)
        writers += awaited_children(job) + await self._clusters(job)
        await self._confirm(job, spec)
        step, refused = next_step(writers, remover, time.time()), ""
        if step is Step.FINISH:
            await self._release(job, "StoreRemoved", "is removed")
            return
        if step is Step.DISCARD and remover is not None:
            await self._context.writer.delete_pod(remover)
        elif step is Step.START:
            try:
                refused = await self._start(job, spec)
            except ApiException as error:
                if not namespace_ends(error):
                    raise
                await self._release(job, "StoreRetained", "stays: no pod can start in a deleted namespace")
                return
        state = state_of(writers, remover, refused)
        await self._context.write_status("grpojobs", job, removal_status(job, state, now()), removal_event)

    async def _end_exports(self, job: _Job) -> None:
        """Delete the pods that export checkpoints; the others end with the RayCluster."""
        for pod in surplus_exporters(job, None, self._context.cache.pods_of(owner_of(job))):
            await self._context.writer.delete_pod(pod)

    async def _clusters(self, job: _Job) -> list[str]:
        """Delete the job's RayCluster and return its name in a list; an empty one when it is gone."""
        cluster = self._context.cache.ray_clusters.get(key_of(job))
        if cluster is None or owner_uid(cluster) != job["metadata"]["uid"]:
            return []
        if not cluster["metadata"].get("deletionTimestamp"):
            await self._context.writer.delete_ray_cluster(*key_of(job))
        return [f"RayCluster {job['metadata']['name']}"]

    async def _confirm(self, job: _Job, spec: GRPOJobSpec | str) -> None:
        """Delete pods on unreachable nodes, whose end no kubelet confirms."""
        if not isinstance(spec, str):
            seconds = eviction_seconds(spec, spec.rollout.template or RolloutTemplate())
            pods = self._context.cache.pods_of(owner_of(job))
            await self._context.delete_unconfirmed(job, pods, seconds)

    async def _start(self, job: _Job, spec: GRPOJobSpec | str) -> str:
        """Create the pod; return why that is refused, or "". Raises ApiException for other errors."""
        if isinstance(spec, str):
            return spec
        try:
            await self._context.writer.create_pod(removal_pod(job, spec, self._context.settings))
        except ApiException as error:
            if error.status not in REFUSALS or namespace_ends(error):
                raise
            return f"the API server refused the pod: {error.reason}"
        return ""

    async def _release(self, job: _Job, reason: str, outcome: str) -> None:
        """Let the job go. ``outcome``: what has become of its folder."""
        writer = self._context.writer
        others = [name for name in job["metadata"]["finalizers"] if name != names.STORE_FINALIZER]
        if not await writer.set_finalizers("grpojobs", job, others):
            return
        folder = names.job_store(job["metadata"]["namespace"], names.writer(job)).rpartition("/")[2]
        message = f"the folder {folder} in the job's store {outcome}"
        log.info("%s: %s", owner_of(job).text, message)
        try:
            await writer.event(job, reason, message, False)
        except ApiException as error:
            if not namespace_ends(error):  # which takes no events either
                raise


def _parsed(job: _Job) -> GRPOJobSpec | str:
    """Return the spec, or what is wrong with it."""
    try:
        return spec_of(GRPOJobSpec, job, accepted=True, served={})
    except ValidationError as error:
        return describe(error)
