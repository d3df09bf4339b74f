"""Exports of checkpoints that annotations ask for; a pod in the job's namespace makes each."""

from typing import Any

from kubernetes.client import ApiException

from grpo_operator.api.names import owner_of
from grpo_operator.api.v1alpha1.export_status import ExportState
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.status import GRPOJobStatus
from grpo_operator.handlers.reconcilers.context import REFUSALS, ReconcileContext, now
from grpo_operator.plan.exports import export_status, exporter, surplus_exporters
from grpo_operator.render.export_pod import export_pod


class CheckpointExport:
    """Creates and follows the pods that export."""

    def __init__(self, context: ReconcileContext) -> None:
        self._context = context

    async def follow(self, job: dict[str, Any], spec: GRPOJobSpec, status: GRPOJobStatus) -> GRPOJobStatus:
        """Return the job's new status with its last export, for which a pod runs. ``status``: without."""
        if self._context.cache.crd_problem:
            return status  # the status cannot record the request, which would never end
        pods, old = self._context.cache.pods_of(owner_of(job)), status.export
        for pod in surplus_exporters(job, old, pods):
            await self._context.writer.delete_pod(pod)
        refused = ""
        # Only a request that the API server has in the status gets a pod.
        if old is not None and old.state is ExportState.RUNNING and exporter(job, old, pods) is None:
            refused = await self._create(export_pod(job, spec, old, self._context.settings))
        return status.model_copy(update={"export": export_status(job, spec, old, pods, refused, now())})

    async def _create(self, pod: dict[str, Any]) -> str:
        """Create the pod; return why that is refused, or "". Raises ApiException for other errors."""
        try:
            await self._context.writer.create_pod(pod)
        except ApiException as error:
            if error.status not in REFUSALS:
                raise
            return f"the API server refused the pod: {error.reason}"
        return ""
