"""Profiles requested by annotation: how one is accepted, sent to the controller and shown (pure).

The operator first moves the annotation's value to another annotation, with an id, in one write. Only then
does the request enter the status, once for each id, so an operator that is restarted in between neither loses
nor repeats it.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

from grpo_operator.api.base import LONGEST_MESSAGE
from grpo_operator.api.messages import ControllerStatus, ProfileOrder, ProfileReport
from grpo_operator.api.names import ACCEPTED_PROFILE, PROFILE_ANNOTATION
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.profile_request import (
    LONGEST_REQUEST,
    ProfileRequest,
    ProfileTarget,
    ProfileTool,
    parse_request,
)
from grpo_operator.api.v1alpha1.profile_status import (
    MOST_FILES,
    MOST_PROFILES,
    ProfileState,
    ProfileStatus,
)
from grpo_operator.plan.observed import Observed
from grpo_operator.plan.status.events import Event

LONGEST_ID = 8
_OPEN = (ProfileState.REQUESTED, ProfileState.RECORDING)


def acceptance(job: dict[str, Any]) -> dict[str, str | None] | None:
    """Return the change of annotations that accepts the job's request; None: there is nothing to accept.

    A request waits while the one before it is not in the status yet.
    """
    annotations = job["metadata"].get("annotations") or {}
    text = annotations.get(PROFILE_ANNOTATION)
    before = _accepted(job)
    shown = [entry["id"] for entry in (job.get("status") or {}).get("profiles") or []]
    if text is None or (before is not None and before[0] not in shown):
        return None
    meta = job["metadata"]
    identity = hashlib.sha256(f"{meta['uid']} {meta['resourceVersion']}".encode()).hexdigest()[:LONGEST_ID]
    accepted = {"id": identity, "job": meta["uid"], "request": text[: LONGEST_REQUEST + 1]}
    return {PROFILE_ANNOTATION: None, ACCEPTED_PROFILE: json.dumps(accepted)}


def _accepted(job: dict[str, Any]) -> tuple[str, str] | None:
    """Return id and text of the last accepted request; None if there is none.

    Users may have edited the annotation, or copied it from another job.
    """
    text = (job["metadata"].get("annotations") or {}).get(ACCEPTED_PROFILE)
    try:
        entry = json.loads(text or "null")
        own = entry["job"] == job["metadata"]["uid"]
        return (str(entry["id"])[:LONGEST_ID], str(entry["request"])) if own else None
    except (ValueError, TypeError, KeyError):
        return None


def profile_statuses(
    job: dict[str, Any],
    spec: GRPOJobSpec,
    old: Sequence[ProfileStatus] | None,
    controller: ControllerStatus | None,
    ended: bool,
    now: str,
) -> list[ProfileStatus] | None:
    """Return the job's newest profiles: the old ones, the accepted one, and what the controller reports."""
    entries, accepted = list(old or ()), _accepted(job)
    if accepted is not None and accepted[0] not in {entry.id for entry in entries}:
        entries.append(_new(*accepted, spec, now))
    reports = {report.id: report for report in controller.profiles} if controller else {}
    result = [_updated(entry, reports.get(entry.id), controller, ended, now) for entry in entries]
    return result[-MOST_PROFILES:] or None


def _new(identity: str, text: str, spec: GRPOJobSpec, now: str) -> ProfileStatus:
    entry = ProfileStatus(
        id=identity, request=text[:LONGEST_REQUEST], state=ProfileState.REQUESTED, requested_at=now
    )
    try:
        request = parse_request(text)
        _check(request, spec)
    except ValueError as error:
        return _failed(entry, str(error), now)
    return entry.model_copy(update={"tool": request.tool, "target": request.target})


def _check(request: ProfileRequest, spec: GRPOJobSpec) -> None:
    """Raise ValueError for a request that this job cannot serve."""
    world, profile = spec.trainer.world, spec.observability.profile
    beyond = [rank for rank in request.of_ranks if rank >= world]
    if request.target is ProfileTarget.TRAINER and beyond:
        raise ValueError(
            f"{PROFILE_ANNOTATION}.ranks: the job has {world} trainer ranks, so it has no rank {beyond[0]}: "
            f"use ranks below {world}"
        )
    if request.tool is ProfileTool.NSIGHT and (profile is None or profile.tool != "nsight"):
        raise ValueError(
            f"{PROFILE_ANNOTATION}.tool: nsight records ranks that run under nsys from their start, which "
            "those of this job do not: use torch, or create the job with "
            "spec.observability.profile.tool: nsight"
        )


def _updated(
    entry: ProfileStatus,
    report: ProfileReport | None,
    controller: ControllerStatus | None,
    ended: bool,
    now: str,
) -> ProfileStatus:
    if entry.state not in _OPEN:
        return entry
    if report is not None and (report.state not in _OPEN or not ended):
        return _reported(entry, report)
    if ended:
        return _failed(entry, "the job ended before the profile was written", now)
    if controller is not None and entry.state is ProfileState.RECORDING:
        return _failed(entry, "the controller was restarted while the profile was recorded: ask again", now)
    return entry


def _reported(entry: ProfileStatus, report: ProfileReport) -> ProfileStatus:
    return entry.model_copy(
        update={
            "state": report.state,
            "path": report.path or None,
            "files": report.files[:MOST_FILES] or None,
            "message": report.message[:LONGEST_MESSAGE] or None,
            "started_at": report.started_at or None,
            "finished_at": report.finished_at or None,
        }
    )


def _failed(entry: ProfileStatus, message: str, now: str) -> ProfileStatus:
    changes = {"state": ProfileState.FAILED, "message": message[:LONGEST_MESSAGE], "finished_at": now}
    return entry.model_copy(update=changes)


def profile_orders(profiles: Iterable[ProfileStatus] | None, observed: Observed) -> list[ProfileOrder]:
    """Return the requests to send to the controller: those that it does not have yet."""
    if observed.controller is None:
        return []
    known = {report.id for report in observed.controller.profiles}
    return [
        ProfileOrder(id=entry.id, request=parse_request(entry.request))
        for entry in profiles or ()
        if entry.state is ProfileState.REQUESTED and entry.id not in known
    ]


def profile_event(before: dict[str, Any], after: dict[str, Any]) -> Event | None:
    """Return the event for the newest profile whose state changed to Written or Failed, if any."""
    old = {entry["id"]: entry["state"] for entry in before.get("profiles") or []}
    for entry in reversed(after.get("profiles") or []):
        state = entry["state"]
        if state == old.get(entry["id"]):
            continue
        if state == ProfileState.FAILED:
            return Event("ProfileFailed", f"profile {entry['id']}: {entry['message']}", True)
        if state == ProfileState.WRITTEN:
            return Event("ProfileWritten", f"profile {entry['id']} is in {entry['path']}", False)
    return None
