"""Checks of a cluster before the first job."""

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from grpo_operator.cli.kubectl.cluster import Cluster, KubectlError

_OPERATOR = "app.kubernetes.io/name=grpo-operator"
_KUBERAY = "app.kubernetes.io/name=kuberay-operator"
_GPU = "nvidia.com/gpu"


class Finding(NamedTuple):
    """Result of one check. ``ok``: None if it does not matter for every job. ``text``: result or remedy."""

    check: str
    ok: bool | None
    text: str


def findings(cluster: Cluster) -> Iterator[Finding]:
    """Yield the result of each check, in the order in which an installation makes them true."""
    checks: tuple[tuple[str, Callable[[Cluster], Finding]], ...] = (
        ("API server", _api_server), ("CRDs", _crds), ("KubeRay", _kuberay), ("operator", _operator),
        ("your rights", _rights), ("GPUs", _gpus), ("jobs", _jobs),
    )  # fmt: skip
    for name, check in checks:
        try:
            yield check(cluster)
        except KubectlError as error:
            yield Finding(name, False, str(error).splitlines()[-1])
            if check is _api_server:
                return


def _api_server(cluster: Cluster) -> Finding:
    version = json.loads(cluster.text("version", "-o", "json"))["serverVersion"]
    return Finding("API server", True, str(version["gitVersion"]))


def _crds(cluster: Cluster) -> Finding:
    wanted = {"grpojobs.rl.grpo.dev", "rolloutpools.rl.grpo.dev"}
    found = {crd["metadata"]["name"] for crd in cluster.items("crds")}
    missing = sorted(wanted - found)
    text = f"install {', '.join(missing)}: kubectl apply --server-side -f crds/" if missing else "installed"
    return Finding("CRDs", not missing, text)


def _kuberay(cluster: Cluster) -> Finding:
    if "rayclusters.ray.io" not in {crd["metadata"]["name"] for crd in cluster.items("crds")}:
        return Finding("KubeRay", False, "there is no RayCluster: install KubeRay 1.6")
    return _running(cluster, "KubeRay", _KUBERAY, "install or restart the KubeRay operator")


def _operator(cluster: Cluster) -> Finding:
    return _running(cluster, "operator", _OPERATOR, "helm install grpo-operator helm/grpo-operator")


def _running(cluster: Cluster, name: str, label: str, remedy: str) -> Finding:
    deployments = cluster.items("deployments", "--all-namespaces", "-l", label)
    ready = sum((each.get("status") or {}).get("readyReplicas", 0) for each in deployments)
    images = sorted({c["image"] for d in deployments for c in d["spec"]["template"]["spec"]["containers"]})
    return Finding(
        name, ready > 0, f"{ready} ready, {', '.join(images)}" if ready else f"not ready: {remedy}"
    )


def _rights(cluster: Cluster) -> Finding:
    try:
        cluster.text("auth", "can-i", "create", "grpojobs.rl.grpo.dev")
    except KubectlError:
        text = "you may not create GRPOJobs in this namespace: bind the ClusterRole grpo-operator-editor"
        return Finding("your rights", False, text)
    return Finding("your rights", True, "you may create GRPOJobs in this namespace")


def _gpus(cluster: Cluster) -> Finding:
    nodes = cluster.items("nodes")
    counts = [int(node["status"].get("allocatable", {}).get(_GPU, 0)) for node in nodes]
    total, with_gpus = sum(counts), sum(count > 0 for count in counts)
    if not total:
        return Finding(
            "GPUs", None, f"no node has {_GPU}: install NVIDIA's GPU operator, or run jobs on CPUs"
        )
    return Finding("GPUs", True, f"{total} on {with_gpus} of {len(nodes)} nodes")


def _jobs(cluster: Cluster) -> Finding:
    jobs = cluster.items("grpojobs.rl.grpo.dev", "--all-namespaces")
    troubled = [job for job in jobs if _troubled(job)]
    names = ", ".join(f"{j['metadata']['namespace']}/{j['metadata']['name']}" for j in troubled[:5])
    text = f"{len(jobs)}, of which need help: {names}" if troubled else f"{len(jobs)}"
    return Finding("jobs", None if troubled else True, text)


def _troubled(job: dict[str, Any]) -> bool:
    status = job.get("status") or {}
    return status.get("phase") in ("Invalid", "Failed") or bool(status.get("reason"))
