"""Objects as the watches last delivered them."""

from typing import Any

Key = tuple[str, str]


class Cache:
    """One dictionary a kind, keyed by (namespace, name). Rebuilt by listing after a restart."""

    def __init__(self) -> None:
        self.jobs: dict[Key, dict[str, Any]] = {}
        self.pools: dict[Key, dict[str, Any]] = {}
        self.ray_clusters: dict[Key, dict[str, Any]] = {}
        self._pods: dict[Key, dict[str, dict[str, Any]]] = {}
        self.children: dict[tuple[str, str, str], dict[str, Any]] = {}
        self.nodes: dict[str, dict[str, Any]] = {}
        self.kuberay = True  # until a look says otherwise

    def pods_of(self, namespace: str, job: str) -> tuple[dict[str, Any], ...]:
        """Pods labelled with the job's name."""
        return tuple(self._pods.get((namespace, job), {}).values())

    def nodes_of_all_but(self, jobs: set[Key]) -> set[str]:
        """Names of the nodes on which pods of other jobs than these run or end."""
        pods = (pod for job, pods in self._pods.items() if job not in jobs for pod in pods.values())
        return {pod["spec"]["nodeName"] for pod in pods if pod["spec"].get("nodeName")}

    def store_pod(self, job: Key, event: dict[str, Any]) -> None:
        """Take over a watch event of a pod that is labelled with the job's name."""
        pods = self._pods.setdefault(job, {})
        store(pods, event["object"]["metadata"]["name"], event)
        if not pods:
            del self._pods[job]


def store(target: dict[Any, dict[str, Any]], key: Any, event: dict[str, Any]) -> None:
    """Take over a watch event."""
    if event["type"] == "DELETED":
        target.pop(key, None)
    else:
        target[key] = event["object"]
