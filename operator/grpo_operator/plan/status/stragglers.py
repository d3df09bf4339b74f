"""Stragglers of a job, as its controller reports them, with their nodes (pure)."""

from typing import Any

from grpo_operator.api.v1alpha1.status import MAX_STRAGGLERS, StragglerStatus
from grpo_operator.plan.observed import Observed
from grpo_operator.plan.status.conditions import NO_PROBLEM, Problem
from grpo_operator.plan.status.events import Event

_NAMED = 3  # stragglers that a message names


def straggler_statuses(observed: Observed) -> list[StragglerStatus]:
    """Return the ranks that are slow now, the slowest first."""
    reported = observed.controller.stragglers if observed.controller else []
    nodes = {pod["metadata"]["name"]: pod.get("spec", {}).get("nodeName") or "" for pod in observed.pods}
    return [
        StragglerStatus(
            rank=one.rank,
            pod=one.pod,
            node=nodes.get(one.pod, ""),
            ratio=f"{one.ratio:.1f}",
            steps=one.steps,
        )
        for one in reported[:MAX_STRAGGLERS]
    ]


def straggler_problem(observed: Observed) -> Problem:
    """Return the problem that names the slowest ranks, if there are any."""
    found = straggler_statuses(observed)
    if not found or observed.controller is None:
        return NO_PROBLEM
    texts = [
        f"{_place(one.wire())} computes {one.ratio} times as long as its pipeline stage's median, "
        f"for {one.steps} steps"
        for one in found[:_NAMED]
    ]
    more = max(observed.controller.straggler_count, len(found)) - len(texts)
    return Problem("Straggler", "; ".join([*texts, *([f"{more} more ranks are slow"] if more > 0 else [])]))


def straggler_event(before: dict[str, Any], after: dict[str, Any]) -> Event | None:
    """Return the event for ranks that a GRPOJob's new status names as stragglers and the one before did not.

    A rank of a new pod is named again.
    """
    known = {(one["rank"], one["pod"]) for one in before.get("stragglers") or []}
    new = [one for one in after.get("stragglers") or [] if (one["rank"], one["pod"]) not in known]
    if not new:
        return None
    texts = [f"{_place(one)} ({one['ratio']} times the median)" for one in new[:_NAMED]]
    more = [f"{len(new) - _NAMED} more"] if len(new) > _NAMED else []
    return Event("Straggler", f"slow ranks: {', '.join(texts + more)}", True)


def _place(one: dict[str, Any]) -> str:
    node = f" on node {one['node']}" if one.get("node") else ""
    return f"rank {one['rank']} in pod {one['pod']}{node}"
