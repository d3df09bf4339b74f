"""Source of a job that starts from another job's checkpoint (pure).

The operator knows what the other job reports, and refuses what cannot become right. Only the job's controller
sees the store: it chooses the checkpoint, and compares the models.
"""

from collections.abc import Mapping
from typing import Any

from grpo_operator.api import names
from grpo_operator.api.v1alpha1.checkpoint import ResumeFromSpec
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.resume_status import ResumedFromStatus
from grpo_operator.plan.lifecycle import is_terminal
from grpo_operator.plan.planner.resolve import RefusedError
from grpo_operator.plan.store_removal import deletes_store

_Job = dict[str, Any]
_FIELD = "spec.checkpoint.resumeFrom"


def fork_source(
    job: _Job, spec: GRPOJobSpec, jobs: Mapping[tuple[str, str], _Job]
) -> ResumedFromStatus | None:
    """Return where the job's first checkpoint comes from; None if it starts from the model's weights.

    ``jobs``: all GRPOJobs, by namespace and name. The answer stays when the other job is deleted.
    Raises RefusedError for a source that this job cannot start from.
    """
    wanted, status = spec.checkpoint.resume_from, job.get("status") or {}
    if wanted is None:
        return None
    if status.get("resumedFrom"):
        return ResumedFromStatus.of_any_release(status["resumedFrom"])
    if is_terminal(status):
        return None
    if wanted.job is None:
        return ResumedFromStatus(folder=wanted.path or wanted.uri or "")
    source = _named(job, wanted.job, jobs)
    _check(spec, wanted, source)
    folder = names.job_store(source["metadata"]["namespace"], names.writer(source))
    bucket = source["spec"]["checkpoint"]["store"].get("uri")
    return ResumedFromStatus(folder=names.in_bucket(bucket, folder) if bucket else folder)


def missing_checkpoint(job: _Job, spec: GRPOJobSpec, jobs: Mapping[tuple[str, str], _Job]) -> str:
    """Return what a job that has not started waits for, if its source still runs; or "".

    Raises RefusedError if the source has ended without the checkpoint.
    """
    wanted, status = spec.checkpoint.resume_from, job.get("status") or {}
    if wanted is None or wanted.job is None or status.get("resumedFrom") or is_terminal(status):
        return ""
    source = _named(job, wanted.job, jobs)
    last = _last_step(source)
    if last >= (wanted.step or 1):
        return ""
    step = f" of step {wanted.step}" if wanted.step else ""
    having = f"its newest is of step {last}" if last else "it has none"
    text = f"{_FIELD}.job={wanted.job}: this job has no complete checkpoint{step}: {having}"
    if is_terminal(source.get("status") or {}):
        raise RefusedError(f"{text}, and it has ended: name another job or step", "SourceUnfit")
    return f"{text}: waiting for it"


def _named(job: _Job, name: str, jobs: Mapping[tuple[str, str], _Job]) -> _Job:
    namespace = job["metadata"]["namespace"]
    if name == job["metadata"]["name"]:
        raise RefusedError(
            f"{_FIELD}.job={name}: a job cannot start from its own checkpoint: name another job, or let the "
            f"job itself go on with the annotation {names.RESUME_ANNOTATION}",
            "SourceUnfit",
        )
    if (namespace, name) not in jobs:
        raise RefusedError(
            f"{_FIELD}.job={name}: namespace {namespace} has no GRPOJob of that name: correct it, or, if the "
            f"job was deleted, set {_FIELD}.path to its folder in the store",
            "SourceNotFound",
        )
    source = jobs[namespace, name]
    if source["metadata"].get("deletionTimestamp") and deletes_store(source):
        raise RefusedError(
            f"{_FIELD}.job={name}: this job is being deleted together with its checkpoints: name another job",
            "SourceUnfit",
        )
    return source


def _check(spec: GRPOJobSpec, wanted: ResumeFromSpec, source: _Job) -> None:
    """Raise RefusedError if the job cannot start from this source, whatever checkpoints it has."""
    theirs, field = source["spec"], f"{_FIELD}.job={wanted.job}"
    store = theirs["checkpoint"]["store"]
    if _readable_by(store) != _readable_by(spec.checkpoint.store.wire()):
        raise RefusedError(
            f"{field}: its checkpoint.store is {_text(store)}, this job's is "
            f"{_text(spec.checkpoint.store.wire())}: use the same store, or a bucket of the same server",
            "SourceUnfit",
        )
    for name, own in (("path", spec.model.path), ("architecture", spec.model.architecture)):
        other = theirs["model"].get(name)
        preset = name == "architecture" or "preset:" in f"{own} {other}"
        if preset and own and other and own != other:
            raise RefusedError(
                f"{field}: its model.{name} is {other}, this job's is {own}: a checkpoint fits its own model "
                "only",
                "SourceUnfit",
            )
    last = _last_step(source)
    ended = is_terminal(source.get("status") or {})
    if ended and wanted.load == "all" and wanted.step is None and spec.total_steps <= last:
        raise RefusedError(
            f"spec.totalSteps={spec.total_steps}: the newest checkpoint of {field} is of step {last}, whose "
            f"steps count as finished: set more than {last}, or set {_FIELD}.load to weights",
            "SourceUnfit",
        )


def _readable_by(store: Mapping[str, str]) -> Mapping[str, str]:
    """Return what is equal in stores whose jobs can read each other's checkpoints.

    Of buckets that is the server: who reads an object needs its URI and access to it.
    """
    bucket = store.get("uri")
    if bucket is None:
        return store
    return {"scheme": bucket.partition(":")[0], "endpoint": store.get("endpoint", "")}


def _last_step(source: _Job) -> int:
    return int(((source.get("status") or {}).get("lastCheckpoint") or {}).get("step") or 0)


def _text(store: Mapping[str, str]) -> str:
    return ", ".join(f"{key} {value}" for key, value in store.items())
