"""Deletion of a job whose folder in the store is removed before the job is gone (pure)."""

from collections.abc import Collection, Iterable
from enum import StrEnum
from typing import Any

from grpo_operator.api import names
from grpo_operator.api.errors import cause_of
from grpo_operator.api.v1alpha1.status import GRPOJobStatus
from grpo_operator.plan.accepted import is_accepted
from grpo_operator.plan.observed import pod_name
from grpo_operator.plan.status.conditions import Conditions, Problem
from grpo_operator.plan.status.container_failures import container_failures
from grpo_operator.plan.status.events import Event
from grpo_operator.plan.status.unschedulable import without_nodes
from grpo_operator.plan.times import seconds_of

RETRY_SECONDS = 30.0  # between the starts of two pods, when the first one was evicted or refused by its node
_CONDITION = "StoreRemoved"
# Finalizers of the garbage collector: --cascade=foreground, where it deletes all that the job owns at that
# moment, and --cascade=orphan, where it takes the owner from it.
_COLLECTOR = ("foregroundDeletion", "orphan")
_MOST = 3  # objects named in a message
_WAY_OUT = "correct that, or set spec.checkpoint.deletionPolicy to Retain to keep the folder"
_Object = dict[str, Any]


class Step(StrEnum):
    """Next step of a removal."""

    WAIT = "wait"
    START = "start"  # create the pod that removes the folder
    DISCARD = "discard"  # delete that pod: another one starts later
    FINISH = "finish"


def deletes_store(job: _Object) -> bool:
    """Return whether the job's folder is removed with the job."""
    return bool(job["spec"].get("checkpoint", {}).get("deletionPolicy") == "Delete")


def is_held(job: _Object) -> bool:
    """Return whether the job cannot go before the operator has removed its folder, or given up on that."""
    return names.STORE_FINALIZER in (job["metadata"].get("finalizers") or [])


def changed_finalizers(job: _Object, starts: bool = False) -> list[str] | None:
    """Return the finalizers that a job gets; None if it has them. ``starts``: its pods come next."""
    holds = deletes_store(job) and (starts or is_accepted(job))
    if holds == is_held(job):
        return None
    others = [name for name in job["metadata"].get("finalizers") or [] if name != names.STORE_FINALIZER]
    return [*others, names.STORE_FINALIZER] if holds else others


def awaited_children(job: _Object) -> list[str]:
    """Return what the garbage collector deals with first, as one name; a pod of now would be part of it."""
    waits = any(name in _COLLECTOR for name in job["metadata"].get("finalizers") or [])
    return ["the children of the job"] if waits else []


def split(pods: Iterable[_Object]) -> tuple[list[str], _Object | None]:
    """Return the names of the job's own pods, and the pod that removes its folder."""
    own, remover = list[str](), None
    for pod in pods:
        if pod["metadata"]["labels"].get(names.POOL_LABEL) == names.STORE_REMOVAL:
            remover = pod
        else:
            own.append(f"pod {pod_name(pod)}")
    return own, remover


def next_step(writers: Collection[str], remover: _Object | None, now: float) -> Step:
    """Return what to do next. ``writers``: names of what writes to the store, or makes pods that do."""
    if remover is None:
        return Step.WAIT if writers else Step.START
    if remover["metadata"].get("deletionTimestamp"):
        return Step.WAIT
    if writers:
        return Step.DISCARD  # what they write has to go too
    phase = remover["status"].get("phase")
    if phase == "Succeeded":
        return Step.FINISH
    old = now - seconds_of(remover["metadata"]["creationTimestamp"]) >= RETRY_SECONDS
    return Step.DISCARD if phase == "Failed" and old else Step.WAIT


def state_of(writers: Collection[str], remover: _Object | None, refused: str = "") -> Problem:
    """Return reason and message of the condition. ``refused``: why the pod cannot be created."""
    if writers:
        more = f" and {len(writers) - _MOST} more" if len(writers) > _MOST else ""
        return Problem("PodsRemain", f"waiting for the end of {', '.join(sorted(writers)[:_MOST])}{more}")
    failures = [failure.text for failure in container_failures([remover] if remover else [])]
    trouble = refused or "; ".join(failures) or without_nodes([remover] if remover else [])
    if trouble:
        return Problem("StoreRemovalFailed", f"{trouble}: {_WAY_OUT}")
    return Problem("RemovingStore", "the job's folder in the store is being removed")


def removal_status(job: _Object, state: Problem, now: str) -> GRPOJobStatus:
    """Return the status of a job that is being deleted: its last one, and how the removal goes."""
    status = GRPOJobStatus.of_any_release(job.get("status") or {})
    before = [condition.wire() for condition in status.conditions]
    conditions = Conditions(before, job["metadata"]["generation"], now)
    conditions.set("StoreRemoved", False, state.reason, state.message)
    others = [condition for condition in status.conditions if condition.type != _CONDITION]
    return status.model_copy(update={"reason": state.reason, "conditions": others + conditions.result()})


def removal_event(before: _Object, after: _Object) -> Event | None:
    """Return the event for a removal that has begun to fail, or fails in another way."""
    old, new = (_condition(status) for status in (before, after))
    failed = new.get("reason") == "StoreRemovalFailed"
    same = old.get("reason") == new.get("reason") and cause_of(_text(old)) == cause_of(_text(new))
    return Event("StoreRemovalFailed", _text(new), True) if failed and not same else None


def _condition(status: _Object) -> _Object:
    found = (c for c in status.get("conditions") or [] if c["type"] == _CONDITION)
    return next(found, {})


def _text(condition: _Object) -> str:
    return str(condition.get("message", ""))
