"""Nodes on which ranks of a job have failed again and again, and which its training pods avoid (pure)."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from grpo_operator.api import names
from grpo_operator.api.base import LONGEST_MESSAGE
from grpo_operator.api.names import FORGET_ANNOTATION
from grpo_operator.api.v1alpha1.status import MAX_FAILING_NODES, FailingNodeStatus
from grpo_operator.plan.capacity.feasibility import PodRequest, node_capacities, place
from grpo_operator.plan.observed import Observed
from grpo_operator.plan.status.events import Event

_LONGEST_VALUE = 256  # of the annotation
_Node = dict[str, Any]


def failing_nodes(
    job: dict[str, Any], observed: Observed, requests: Sequence[PodRequest], nodes: Sequence[_Node],
    used: Mapping[str, int],
) -> list[FailingNodeStatus]:  # fmt: skip
    """Return the failing nodes that the controller reports, and which of them are avoided.

    A node is not avoided if the job's pods would not fit then. ``used``: GPUs of others by node. Without a
    controller, those of the status are kept.
    """
    if observed.controller is None:
        return seen_failing(job)
    reported = observed.controller.node_failures[:MAX_FAILING_NODES]
    chosen = [one.node for one in reported if one.avoided]
    while chosen and not _fit_elsewhere(requests, nodes, used, chosen):
        chosen.pop()
    return [
        FailingNodeStatus(
            node=one.node,
            failures=one.failures,
            message=one.reason[:LONGEST_MESSAGE],
            avoided=one.node in chosen,
        )
        for one in reported
    ]


def _fit_elsewhere(
    requests: Sequence[PodRequest], nodes: Sequence[_Node], used: Mapping[str, int], avoided: Collection[str]
) -> bool:
    """Return whether the training pods fit on other nodes, and the other pods beside them on any."""
    free = node_capacities(nodes)
    for node in free:
        node.gpus -= used.get(node.name, 0)
    trainers = [request for request in requests if request.pool == names.TRAINER]
    others = [request for request in requests if request.pool != names.TRAINER]
    elsewhere = [node for node in free if node.name not in avoided]
    return place(trainers, elsewhere) is None and place(others, free) is None


def seen_failing(job: dict[str, Any]) -> list[FailingNodeStatus]:
    """Return the failing nodes in the job's status."""
    seen = (job.get("status") or {}).get("failingNodes") or []
    return [FailingNodeStatus.of_any_release(one) for one in seen]


def avoided_names(failing: Iterable[FailingNodeStatus]) -> set[str]:
    """Return the names of the nodes that are avoided."""
    return {one.node for one in failing if one.avoided}


def forget_request(job: dict[str, Any], observed: Observed) -> str | None:
    """Return the user's request to forget failures, unless the controller has it or does not answer."""
    value = str((job["metadata"].get("annotations") or {}).get(FORGET_ANNOTATION, ""))[:_LONGEST_VALUE]
    if not value or observed.controller is None or observed.controller.forget_nodes == value:
        return None
    return value


def failing_event(before: dict[str, Any], after: dict[str, Any]) -> Event | None:
    """Return the event for nodes that are avoided from now on, or no longer."""
    old, new = (
        {one["node"]: one for one in status.get("failingNodes") or [] if one.get("avoided")}
        for status in (before, after)
    )
    added, gone = [new[name] for name in sorted(new.keys() - old)], sorted(old.keys() - new)
    if added:
        texts = [f"node {one['node']} ({one['failures']} failures, last: {one['message']})" for one in added]
        return Event("NodeAvoided", f"training pods avoid {'; '.join(texts)}"[:LONGEST_MESSAGE], True)
    if gone:
        return Event("NodeAllowed", f"training pods may run on {', '.join(gone)} again", False)
    return None
