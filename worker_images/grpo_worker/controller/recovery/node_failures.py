"""Failures of the job's ranks by node, and the nodes that it avoids because of them (pure)."""

from grpo_operator.api.messages import NodeFailures
from grpo_operator.api.v1alpha1.restart_policy import AvoidNodesPolicy
from grpo_operator.api.v1alpha1.status import MAX_FAILING_NODES
from grpo_worker.common.errors import LONGEST

NodeLog = dict[str, list[tuple[float, str]]]  # node -> (seconds since 1970, reason), oldest first


def noted(log: NodeLog, node: str, now: float, reason: str, policy: AvoidNodesPolicy) -> NodeLog:
    """Return the log with one more failure, and without those outside of the window."""
    since = now - policy.window_hours * 3600
    longer = log | {node: [*log.get(node, ()), (now, reason[:LONGEST])]}
    recent = {name: [(at, why) for at, why in entries if at > since] for name, entries in longer.items()}
    return {name: entries for name, entries in recent.items() if entries}


def report(log: NodeLog, now: float, nodes: int, policy: AvoidNodesPolicy) -> list[NodeFailures]:
    """Return the failures by node, those with the most first. ``nodes``: of the gang.

    An error of the job's own code fails on every node, so only some of the nodes are avoided.
    """
    since = now - policy.window_hours * 3600
    recent = {name: [why for at, why in entries if at > since] for name, entries in log.items()}
    ordered = sorted((name for name in recent if recent[name]), key=lambda name: (-len(recent[name]), name))
    most = max(1, policy.max_nodes_percent * nodes // 100) if policy.max_nodes_percent else 0
    return [
        NodeFailures(
            node=name,
            failures=len(recent[name]),
            reason=recent[name][-1],
            avoided=place < most and len(recent[name]) >= policy.failures,
        )
        for place, name in enumerate(ordered[:MAX_FAILING_NODES])
    ]
