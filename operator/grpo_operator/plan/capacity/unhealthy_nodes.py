"""Selects the pods that must leave an unhealthy node (pure).

Health agents mark a node with a condition or a taint and cordon it. A pod is moved only when its node is
cordoned: otherwise its replacement could be scheduled to the same node.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from grpo_operator.api.v1alpha1.scheduling import SchedulingSpec

_Node = dict[str, Any]


def to_replace(
    pods: Iterable[dict[str, Any]], node: Callable[[str], _Node | None], scheduling: SchedulingSpec
) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield pods on cordoned nodes that match ``scheduling.unhealthyNodes``, each with the reason."""
    for pod in pods:
        name = pod["spec"].get("nodeName")
        host = node(name) if name and not pod["metadata"].get("deletionTimestamp") else None
        mark = _unhealthy_mark(host, scheduling) if host else None
        if host and mark and host["spec"].get("unschedulable"):
            yield pod, f"pod {pod['metadata']['name']} leaves node {name}: {mark}"


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
