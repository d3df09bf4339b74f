"""Decides whether a job that has ended goes on (pure).

A job that has succeeded goes on when ``totalSteps`` is raised, and one that has failed when the annotation
``rl.grpo.dev/resume`` gets a value that it did not have while the job ran. The job gets new pods once all of
its old ones are gone, so that no report of theirs can end it again.
"""

from typing import Any, NamedTuple

from grpo_operator.api.base import LONGEST_MESSAGE
from grpo_operator.api.names import RESUME_ANNOTATION
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.resume_status import LONGEST_VALUE, ResumptionStatus
from grpo_operator.api.v1alpha1.status import Phase
from grpo_operator.plan.lifecycle import is_terminal
from grpo_operator.plan.observed import Observed


class Resumption(NamedTuple):
    """Answer to the request that an ended job goes on. ``granted``: it does. ``message``: the reason."""

    granted: bool
    message: str


def requested(job: dict[str, Any], spec: GRPOJobSpec) -> Resumption | None:
    """Return what the job is asked to do; None if it has not ended, or nobody asks."""
    status = job.get("status") or {}
    if not is_terminal(status):
        return None
    value, step = _value(job), status.get("step") or 0
    asked = value is not None and value != _old(job).request
    if status["phase"] == Phase.FAILED:
        return Resumption(True, f"resumed by {RESUME_ANNOTATION}={value}") if asked else None
    if spec.total_steps > step:
        return Resumption(True, f"resumed by totalSteps={spec.total_steps}: {step} steps are done")
    if asked:
        text = f"{RESUME_ANNOTATION}={value}: all of totalSteps={spec.total_steps} steps are done: raise it"
        return Resumption(False, text)
    return None


def granted(job: dict[str, Any], spec: GRPOJobSpec) -> bool:
    """Return whether the job has ended and goes on."""
    found = requested(job, spec)
    return found is not None and found.granted


def begins(job: dict[str, Any], spec: GRPOJobSpec, observed: Observed) -> bool:
    """Return whether the job goes on now: its old pods are gone, and none are created."""
    cluster = observed.ray_cluster
    return granted(job, spec) and not observed.pods and (cluster is None or cluster.suspended)


def times(job: dict[str, Any], spec: GRPOJobSpec) -> int:
    """Return how often the job has been resumed, with the resumption that its next pods belong to."""
    return _old(job).times + granted(job, spec)


def resumption_status(
    job: dict[str, Any], spec: GRPOJobSpec, begun: bool, now: str
) -> ResumptionStatus | None:
    """Return the part of the status. ``begun``: the job goes on now.

    A value that the annotation has while the job runs is used up: it does not resume the job later.
    """
    old, value, found = _old(job), _value(job), requested(job, spec)
    if begun and found is not None:
        return ResumptionStatus(
            times=old.times + 1,
            at=now,
            request=value or old.request,
            message=found.message[:LONGEST_MESSAGE],
        )
    going_on = found is not None and found.granted  # as soon as its old pods are gone
    if value not in (None, old.request) and not going_on:
        text = found.message if found else f"{RESUME_ANNOTATION}={value}: the job has not ended"
        started = (job.get("status") or {}).get("startedAt")
        message = text[:LONGEST_MESSAGE] if started else None  # a copied manifest asks for nothing
        old = old.model_copy(update={"request": value, "message": message})
    return old if old != ResumptionStatus() else None


def _old(job: dict[str, Any]) -> ResumptionStatus:
    seen = (job.get("status") or {}).get("resumption")
    return ResumptionStatus.of_any_release(seen or {})


def _value(job: dict[str, Any]) -> str | None:
    value = (job["metadata"].get("annotations") or {}).get(RESUME_ANNOTATION)
    return None if value is None else str(value)[:LONGEST_VALUE]
