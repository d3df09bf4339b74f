"""Export of a checkpoint that an annotation asks for (pure).

A request enters the status first, once for each value of the annotation. The pod that exports is created for
a request in the status only, so an operator that is restarted in between neither loses nor repeats it.
"""

from collections.abc import Iterable
from typing import Any

from grpo_operator.api import names
from grpo_operator.api.base import LONGEST_MESSAGE
from grpo_operator.api.v1alpha1.export_request import LONGEST_REQUEST, parse_request
from grpo_operator.api.v1alpha1.export_status import ExportState, ExportStatus
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.plan.observed import pod_name
from grpo_operator.plan.status.container_failures import container_failures
from grpo_operator.plan.status.events import Event
from grpo_operator.plan.status.unschedulable import without_nodes

_NO_CHECKPOINT = (
    f"{names.EXPORT_ANNOTATION}: the job has no complete checkpoint: ask again when "
    "status.lastCheckpoint is there"
)
_Object = dict[str, Any]


def is_export(pod: _Object) -> bool:
    """Return whether a pod of a job exports a checkpoint."""
    return bool(pod["metadata"]["labels"].get(names.POOL_LABEL) == names.EXPORT)


def own_pods(pods: Iterable[_Object]) -> tuple[_Object, ...]:
    """Return the pods that train and generate, without those that export."""
    return tuple(pod for pod in pods if not is_export(pod))


def export_status(
    job: _Object, spec: GRPOJobSpec, old: ExportStatus | None, pods: Iterable[_Object], refused: str, now: str
) -> ExportStatus | None:
    """Return the last export that was asked for; None if there is none.

    ``pods``: of the job. ``refused``: why the pod cannot be created.
    """
    request = (job["metadata"].get("annotations") or {}).get(names.EXPORT_ANNOTATION)
    if request is not None and (old is None or old.request != request[:LONGEST_REQUEST]):
        return _new(job, spec, request, now)
    if old is None or old.state is not ExportState.RUNNING:
        return old
    if refused:
        return _failed(old, refused, now)
    pod = exporter(job, old, pods)
    return old if pod is None else _followed(old, pod, now)


def exporter(job: _Object, export: ExportStatus, pods: Iterable[_Object]) -> _Object | None:
    """Return the pod of a request, if it exists."""
    name = names.export_pod(job, export.request)
    return next((pod for pod in pods if pod_name(pod) == name), None)


def surplus_exporters(job: _Object, export: ExportStatus | None, pods: Iterable[_Object]) -> list[_Object]:
    """Return the pods that export, but for the one of a running ``export``; the status has its end."""
    runs = export is not None and export.state is ExportState.RUNNING
    name = names.export_pod(job, export.request) if export is not None and runs else ""
    return [
        pod
        for pod in pods
        if is_export(pod) and pod_name(pod) != name and not pod["metadata"].get("deletionTimestamp")
    ]


def export_event(before: _Object, after: _Object) -> Event | None:
    """Return the event for an export that was written or has failed."""
    old, new = before.get("export") or {}, after.get("export") or {}
    if new.get("state") == old.get("state") and new.get("request") == old.get("request"):
        return None
    if new.get("state") == ExportState.FAILED:
        return Event("ExportFailed", new["message"], True)
    if new.get("state") == ExportState.WRITTEN:
        return Event("ExportWritten", f"the checkpoint of step {new['step']} is in {new['path']}", False)
    return None


def _new(job: _Object, spec: GRPOJobSpec, text: str, now: str) -> ExportStatus:
    status = ExportStatus(request=text[:LONGEST_REQUEST], state=ExportState.RUNNING, requested_at=now)
    try:
        request = parse_request(text)
    except ValueError as error:
        return _failed(status, str(error), now)
    newest = ((job.get("status") or {}).get("lastCheckpoint") or {}).get("step")
    if newest is None:
        return _failed(status, _NO_CHECKPOINT, now)
    step = newest if request.step is None else request.step
    uri = spec.checkpoint.store.uri
    folder = names.job_store(job["metadata"]["namespace"], names.writer(job))
    place = names.export_folder(names.in_bucket(uri, folder) if uri else folder, request.directory(step))
    return status.model_copy(update={"step": step, "path": place})


def _followed(export: ExportStatus, pod: _Object, now: str) -> ExportStatus:
    """Return the status with the state of its pod."""
    phase = pod["status"].get("phase")
    if phase == "Succeeded":
        changes = {"state": ExportState.WRITTEN, "message": None, "finished_at": now}
        return export.model_copy(update=changes)
    trouble = "; ".join(failure.text for failure in container_failures([pod])) or without_nodes([pod])
    if phase == "Failed":
        return _failed(export, trouble or f"pod {pod_name(pod)} failed", now)
    return export.model_copy(update={"message": trouble[:LONGEST_MESSAGE] or None})


def _failed(export: ExportStatus, message: str, now: str) -> ExportStatus:
    changes = {"state": ExportState.FAILED, "message": message[:LONGEST_MESSAGE], "finished_at": now}
    return export.model_copy(update=changes)
