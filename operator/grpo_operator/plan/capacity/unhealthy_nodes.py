"""Selects the pods that must leave a node (pure).

Health agents mark a node with a condition or a taint and cordon it. A pod is moved only when its node is
cordoned: otherwise its replacement could be scheduled to the same node. Training pods leave a node that the
job avoids, too. Agents may be wrong, so only a share of the job's nodes is left at a time.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from grpo_operator.api import names
from grpo_operator.api.v1alpha1.scheduling import SchedulingSpec, UnhealthyNodes

_Node = dict[str, Any]
_Pod = dict[str, Any]


class Moves(NamedTuple):
    """Pods to delete now, each with the reason. ``held``: message about those that have to wait, or ""."""

    now: list[tuple[_Pod, str]]
    held: str


def moves(
    pods: Sequence[_Pod],
    wanted: int,
    node: Callable[[str], _Node | None],
    scheduling: SchedulingSpec,
    avoided: Collection[str] = (),
) -> Moves:
    """Return the pods that leave their nodes now. ``wanted``: number of pods that the job should have.

    ``avoided``: nodes that training pods leave. Pods that are missing or do not run yet are on their way from
    a node that was left before.
    """
    due: dict[str, list[tuple[_Pod, str]]] = {}
    for pod, reason in _leaving(pods, node, scheduling, avoided):
        due.setdefault(pod["spec"]["nodeName"], []).append((pod, reason))
    ours = {name for pod in pods if (name := pod["spec"].get("nodeName"))}
    away = wanted - sum(_is_there(pod) or _waits(pod, due) for pod in pods)
    room = max(0, _most(scheduling.unhealthy_nodes, len(ours)) - away)
    order = sorted(due)
    now = [move for name in order[:room] for move in due[name]]
    if not order[room:]:
        return Moves(now, "")
    limit = f"scheduling.unhealthyNodes.maxNodesPercent={scheduling.unhealthy_nodes.max_nodes_percent}"
    waiting = ", ".join(order[room:][:3]) + (" and more" if len(order[room:]) > 3 else "")
    text = f"pods stay on unhealthy nodes ({waiting}) until others have been replaced: {limit} of {len(ours)}"
    return Moves(now, text)


def _leaving(
    pods: Iterable[_Pod], node: Callable[[str], _Node | None], scheduling: SchedulingSpec,
    avoided: Collection[str],
) -> Iterator[tuple[_Pod, str]]:  # fmt: skip
    """Yield the pods that must leave their node, each with the reason."""
    for pod in pods:
        name = pod["spec"].get("nodeName")
        host = node(name) if name and not pod["metadata"].get("deletionTimestamp") else None
        if host is None:
            continue
        mark = _unhealthy_mark(host, scheduling)
        text = f"pod {pod['metadata']['name']} leaves node {name}"
        if mark and host["spec"].get("unschedulable"):
            yield pod, f"{text}: {mark}"
        elif name in avoided and pod["metadata"]["labels"].get(names.POOL_LABEL) == names.TRAINER:
            yield pod, f"{text}: ranks of the job have failed there again and again"


def _most(limits: UnhealthyNodes, nodes: int) -> int:
    return max(1, limits.max_nodes_percent * nodes // 100)


def _is_there(pod: _Pod) -> bool:
    return pod["status"].get("phase") == "Running" and not pod["metadata"].get("deletionTimestamp")


def _waits(pod: _Pod, due: Collection[str]) -> bool:
    """Return whether a pod, which may not run, has yet to leave its node."""
    return pod["spec"].get("nodeName") in due and not pod["metadata"].get("deletionTimestamp")


def _unhealthy_mark(node: _Node, scheduling: SchedulingSpec) -> str | None:
    """Return the first condition or taint of the node that matches, or None."""
    matchers = scheduling.unhealthy_nodes
    for condition in node["status"].get("conditions") or []:
        if condition["type"] in matchers.conditions and condition["status"] == "True":
            return f"condition {condition['type']}"
    for taint in node["spec"].get("taints") or []:
        if taint["key"] in matchers.taints:
            return f"taint {taint['key']}"
    return None
