"""What the cluster should look like for one job (pure): shall its pods exist?"""

from typing import Any

from grpo_operator.api import names
from grpo_operator.api.v1alpha1.status import Phase
from grpo_operator.plan.observed import Observed

TERMINAL = (Phase.SUCCEEDED, Phase.FAILED)


def is_terminal(status: dict[str, Any]) -> bool:
    """Did the job end? Latched: an ended job never starts again."""
    return status.get("phase") in TERMINAL


def cluster_unwanted(status: dict[str, Any], cleanup: str, suspend: bool, queued: bool) -> bool:
    """Should the RayCluster itself go? ``suspend``: its pods must go (see pods_suspended).

    Of a queued one ``spec.suspend`` is Kueue's: only without the object the quota is free again.
    """
    return (cleanup == "All" and is_terminal(status)) or (suspend and queued)


def pods_suspended(
    status: dict[str, Any], suspend: bool, observed: Observed, cleanup: str = "Workers"
) -> bool:
    """Should the RayCluster's pods be gone?

    A running job first saves a checkpoint: its pods go once the controller says so, or when
    no controller runs that could.
    """
    if is_terminal(status):
        return cleanup != "None"
    if not suspend:
        return False
    cluster = observed.ray_cluster
    if cluster is None or cluster.suspended or cluster.condition("RayClusterSuspending"):
        return True
    started = [p for p in observed.of_pool(names.CONTROLLER) if p["status"].get("phase") != "Pending"]
    if not started:
        return True  # nobody holds what a checkpoint lacks
    progress = observed.progress
    return progress is not None and progress["phase"] in (Phase.SUSPENDED, *TERMINAL)


def wish_to_suspend(suspend: bool, observed: Observed) -> bool | None:
    """What to tell the controller, or None when it knows."""
    progress = observed.progress
    if progress is None or progress["suspend_requested"] == suspend:
        return None
    return suspend
