"""Placement and devices of pods (pure): fields of a PodSpec."""

from collections.abc import Sequence
from typing import Any

from grpo_operator.api import names
from grpo_operator.api.v1alpha1.scheduling import SchedulingSpec, WithOverlay
from grpo_operator.plan.capacity.feasibility import GPU
from grpo_operator.plan.capacity.topology import Leaves

# NVIDIA's container runtime gives such a container NVML for all GPUs of the node, and not CUDA. Where it
# ignores the capabilities, CUDA finds no device. Where it does not read the variables of containers without
# GPUs, the agent has no NVML and reports no GPU health.
MANAGEMENT_ENV = {
    "NVIDIA_VISIBLE_DEVICES": "all",
    "NVIDIA_DRIVER_CAPABILITIES": "utility",
    "CUDA_VISIBLE_DEVICES": "",
}
GPU_NODE = "nvidia.com/gpu.present"  # label that NVIDIA's GPU feature discovery sets on GPU nodes
_MOST = 100  # weight of a preference, Kubernetes' largest


def tolerations(scheduling: SchedulingSpec, pool: WithOverlay) -> list[dict[str, Any]]:
    """Return the tolerations of a pod, with the seconds that it stays on an unreachable node.

    With Kubernetes' default of 5 minutes, one lost node would idle the whole gang for that time.
    """
    wait = scheduling.eviction_seconds_of(pool)
    own = [
        {
            "key": f"node.kubernetes.io/{condition}",
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": wait,
        }
        for condition in ("not-ready", "unreachable")
    ]
    given = [{k: v for k, v in t.wire().items() if v} for t in scheduling.tolerations]
    return [*own, *given]


def prefer_apart_from(labels: dict[str, str]) -> dict[str, Any]:
    """Return an affinity that prefers nodes without a pod that has these labels.

    It does not exclude the others: all GPUs of a small cluster may be in one node.
    """
    preferred = {"weight": _MOST, "podAffinityTerm": same_host(labels)}
    return {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [preferred]}}


def beside(labels: dict[str, str], alone: dict[str, str] | None) -> dict[str, Any]:
    """Return an affinity for nodes with a pod that has these labels, and no pod with the labels ``alone``."""
    together = {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [same_host(labels)]}}
    if not alone:
        return together
    apart = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [same_host(alone)]}}
    return together | apart


def same_host(labels: dict[str, str]) -> dict[str, Any]:
    """Return the affinity term of hosts with a pod that has these labels."""
    return {"labelSelector": {"matchLabels": labels}, "topologyKey": "kubernetes.io/hostname"}


def packed(labels: dict[str, str], key: str, hosts: int) -> dict[str, Any]:
    """Affinity: pods of a pool fill leaf by leaf; the pods of an engine of several hosts share one
    leaf, which is required, not preferred.
    """
    mine = {"labelSelector": {"matchLabels": labels}, "topologyKey": key}
    terms: dict[str, Any] = {
        "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": _MOST, "podAffinityTerm": mine}]
    }
    if hosts > 1:
        together = mine | {"matchLabelKeys": [names.REPLICA_NAME]}
        terms["requiredDuringSchedulingIgnoredDuringExecution"] = [together]
    return {"podAffinity": terms}


def prefer_leaves(key: str, leaves: Leaves) -> dict[str, Any]:
    """Return the affinity of training pods: they prefer their leaves and avoid those reserved for engines."""
    if not leaves.trainer:
        return {}
    rule = {"key": key, "operator": "In", "values": list(leaves.trainer)}
    terms = _preferred(rule)
    if leaves.reserved:
        terms |= _required(key, "NotIn", leaves.reserved)
    return {"nodeAffinity": terms}


def bind_to_leaf(spec: dict[str, Any], key: str, leaf: str) -> None:
    """Restrict the pod to the nodes of this leaf."""
    spec.setdefault("affinity", {})["nodeAffinity"] = _required(key, "In", [leaf])


def avoid_hosts(spec: dict[str, Any], hosts: Sequence[str]) -> None:
    """Keep the pod off these hosts, besides what its node affinity requires already."""
    if not hosts:
        return
    rule = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": list(hosts)}
    node = spec.setdefault("affinity", {}).setdefault("nodeAffinity", {})
    required = node.get("requiredDuringSchedulingIgnoredDuringExecution") or {"nodeSelectorTerms": [{}]}
    node["requiredDuringSchedulingIgnoredDuringExecution"] = {
        "nodeSelectorTerms": [
            term | {"matchExpressions": [*term.get("matchExpressions", ()), rule]}
            for term in required["nodeSelectorTerms"]
        ]
    }


def prefer_off_gpu_nodes() -> dict[str, Any]:
    """Return the affinity of pods without GPUs, which prefer nodes without GPUs.

    It does not exclude GPU nodes: a small cluster may have no others.
    """
    return {"nodeAffinity": _preferred({"key": GPU_NODE, "operator": "NotIn", "values": ["true"]})}


def _preferred(rule: dict[str, Any]) -> dict[str, Any]:
    preferred = {"weight": _MOST, "preference": {"matchExpressions": [rule]}}
    return {"preferredDuringSchedulingIgnoredDuringExecution": [preferred]}


def _required(key: str, operator: str, values: Sequence[str]) -> dict[str, Any]:
    rule = {"key": key, "operator": operator, "values": list(values)}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [rule]}]}
    return {"requiredDuringSchedulingIgnoredDuringExecution": terms}


def prepare_for_nccl(container: dict[str, Any], scheduling: SchedulingSpec) -> None:
    """Add NCCL's environment and a large /dev/shm."""
    have = {variable["name"] for variable in container["env"]}
    container["env"] += [
        {"name": name, "value": value}
        for name, value in scheduling.gpu_environment.items()
        if name not in have
    ]
    container["volumeMounts"].append({"name": "shm", "mountPath": "/dev/shm"})


def see_all_gpus(container: dict[str, Any]) -> None:
    """Give a container all GPUs of the node without requesting them: the training pod owns them."""
    resources = container["resources"]
    for kind in ("requests", "limits"):
        resources[kind] = {name: value for name, value in resources[kind].items() if name != GPU}
    container["env"].append({"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"})


def share_sockets(spec: dict[str, Any]) -> None:
    """Let processes of this pod meet those of other pods on the node, to pass on memory of GPUs."""
    folder = {"path": names.SOCKETS, "type": "DirectoryOrCreate"}
    spec["volumes"].append({"name": "sockets", "hostPath": folder})
    for container in spec["containers"]:
        container["volumeMounts"].append({"name": "sockets", "mountPath": names.SOCKETS})
        container["env"].append({"name": names.SOCKETS_VARIABLE, "value": names.SOCKETS})


def shared_memory(scheduling: SchedulingSpec) -> dict[str, Any]:
    """Return the pod's volume for /dev/shm."""
    limit = {"sizeLimit": scheduling.shared_memory} if scheduling.shared_memory else {}
    return {"name": "shm", "emptyDir": {"medium": "Memory"} | limit}


def cluster_labels(scheduling: SchedulingSpec) -> dict[str, str]:
    """Return the labels of the RayCluster from which Kueue and KubeRay's gang schedulers read the queue."""
    labels: dict[str, str] = {}
    if scheduling.queue_name:
        labels["kueue.x-k8s.io/queue-name"] = scheduling.queue_name
    if scheduling.gang_scheduler != "none":
        labels["ray.io/gang-scheduling-enabled"] = "true"
    key = _GANG_QUEUE.get(scheduling.gang_scheduler)
    if key and scheduling.gang_queue:
        labels[key] = scheduling.gang_queue
    if scheduling.priority_class_name and scheduling.gang_scheduler != "none":
        labels["ray.io/priority-class-name"] = scheduling.priority_class_name
    return labels


_GANG_QUEUE = {
    "volcano": "volcano.sh/queue-name",
    "yunikorn": "yunikorn.apache.org/queue",
    "kai": "kai.scheduler/queue",
}
