"""Decides whether a job's RayCluster and its pods should exist (pure)."""

from typing import Any

from grpo_operator.api import names
from grpo_operator.api.v1alpha1.status import Phase
from grpo_operator.plan.observed import Observed

TERMINAL = (Phase.SUCCEEDED, Phase.FAILED)


def is_terminal(status: dict[str, Any]) -> bool:
    """Return whether the job has ended. The phase is latched until the job is resumed; see resumption."""
    return status.get("phase") in TERMINAL


def cluster_unwanted(status: dict[str, Any], cleanup: str, suspend: bool, queued: bool) -> bool:
    """Return whether the RayCluster itself should be deleted.

    ``suspend``: its pods must go (see pods_suspended). For a ``queued`` job, ``spec.suspend`` of the
    RayCluster belongs to Kueue, and Kueue releases the quota only when the object is deleted.
    """
    return (cleanup == "All" and is_terminal(status)) or (suspend and queued)


def pods_suspended(
    status: dict[str, Any],
    suspend: bool,
    observed: Observed,
    cleanup: str = "Workers",
    resuming: bool = False,
) -> bool:
    """Return whether the RayCluster's pods should be deleted.

    ``resuming``: the job has ended and goes on when its pods are gone.

    A running job saves a checkpoint first: its pods are deleted once its controller reports that it is
    suspended, or when no controller is running that could save one.
    """
    if is_terminal(status):
        return resuming or cleanup != "None"
    if not suspend:
        return False
    cluster = observed.ray_cluster
    if cluster is None or cluster.suspended or cluster.condition("RayClusterSuspending"):
        return True
    started = [p for p in observed.of_pool(names.CONTROLLER) if p["status"].get("phase") != "Pending"]
    if not started:
        return True  # nothing has happened since the last checkpoint
    controller = observed.controller
    return controller is not None and controller.phase in (Phase.SUSPENDED, *TERMINAL)


def suspend_request(suspend: bool, observed: Observed) -> bool | None:
    """Return the request to send to the controller, or None when it already has it or does not answer."""
    controller = observed.controller
    if controller is None or controller.suspend_requested == suspend:
        return None
    return suspend
