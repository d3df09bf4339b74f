"""Pods for which the scheduler finds no node (pure)."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

_LONGEST = 512  # characters of the scheduler's message that are kept
_MAX_MESSAGES = 2


def unschedulable(status: dict[str, Any]) -> str:
    """Return the scheduler's message about a pod without a node, or ""."""
    for condition in status.get("conditions") or []:
        if condition["type"] == "PodScheduled" and condition.get("reason") == "Unschedulable":
            return str(condition.get("message", ""))[:_LONGEST]
    return ""


def without_nodes(pods: Iterable[dict[str, Any]]) -> str:
    """Return what the scheduler says about pods, as the cache keeps it under ``status.unschedulable``."""
    waiting = [pod for pod in pods if pod.get("status", {}).get("unschedulable")]
    said = Counter(pod["status"]["unschedulable"] for pod in waiting)
    first = {pod["status"]["unschedulable"]: pod["metadata"]["name"] for pod in reversed(waiting)}
    return "; ".join(
        _text(message, first[message], count) for message, count in said.most_common(_MAX_MESSAGES)
    )


def _text(message: str, pod: str, count: int) -> str:
    others = f" and {count - 1} more" if count > 1 else ""
    return f"no node for {pod}{others}: {message}"
