"""Pods that must leave a sick node (pure).

Health agents mark a node with a condition or a taint, and cordon it. Only when the node takes no new
pods is a pod moved: it would come back otherwise.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from grpo_operator.api.v1alpha1.scheduling import SchedulingSpec

_Node = dict[str, Any]


def to_replace(
    pods: Iterable[dict[str, Any]], node: Callable[[str], _Node | None], scheduling: SchedulingSpec
) -> Iterator[tuple[dict[str, Any], str]]:
    """Pods on nodes that match ``scheduling.unhealthyNodes`` and are closed, each with the reason."""
    for pod in pods:
        name = pod["spec"].get("nodeName")
        found = node(name) if name and not pod["metadata"].get("deletionTimestamp") else None
        sign = _sign(found, scheduling) if found else None
        if found and sign and found["spec"].get("unschedulable"):
            yield pod, f"pod {pod['metadata']['name']} leaves node {name}: {sign}"


def _sign(node: _Node, scheduling: SchedulingSpec) -> str | None:
    """The first condition or taint of the node that means a sick one."""
    matchers = scheduling.unhealthy_nodes
    for condition in node["status"].get("conditions") or []:
        if condition["type"] in matchers.conditions and condition["status"] == "True":
            return f"condition {condition['type']}"
    for taint in node["spec"].get("taints") or []:
        if taint["key"] in matchers.taints:
            return f"taint {taint['key']}"
    return None
