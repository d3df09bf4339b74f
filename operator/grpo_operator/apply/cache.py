"""Objects as the watches last delivered them."""

from typing import Any

from grpo_operator.plan import names

Key = tuple[str, str]


class Cache:
    """One dictionary a kind, keyed by (namespace, name). Rebuilt by listing after a restart."""

    def __init__(self) -> None:
        self.jobs: dict[Key, dict[str, Any]] = {}
        self.pools: dict[Key, dict[str, Any]] = {}
        self.ray_clusters: dict[Key, dict[str, Any]] = {}
        self.pods: dict[Key, dict[str, Any]] = {}
        self.children: dict[tuple[str, str, str], dict[str, Any]] = {}
        self.nodes: dict[str, dict[str, Any]] = {}

    def pods_of(self, namespace: str, job: str) -> tuple[dict[str, Any], ...]:
        """Pods labelled with the job's name."""
        return tuple(
            pod
            for (pod_namespace, _), pod in self.pods.items()
            if pod_namespace == namespace and pod["metadata"]["labels"].get(names.JOB_LABEL) == job
        )


def store(target: dict[Any, dict[str, Any]], key: Any, event: dict[str, Any]) -> None:
    """Take over a watch event."""
    if event["type"] == "DELETED":
        target.pop(key, None)
    else:
        target[key] = event["object"]
