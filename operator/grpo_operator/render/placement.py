"""Where pods go and which devices they get (pure): fields of a PodSpec."""

from collections.abc import Sequence
from typing import Any

from grpo_operator.api import names
from grpo_operator.api.v1alpha1.scheduling import SchedulingSpec
from grpo_operator.plan.capacity.feasibility import GPU
from grpo_operator.plan.capacity.topology import Leaves

GPU_NODE = "nvidia.com/gpu.present"  # label that NVIDIA's feature discovery puts on GPU nodes


def tolerations(scheduling: SchedulingSpec, seconds: int | None) -> list[dict[str, Any]]:
    """Stay this long on a lost node; Kubernetes' default of 5 minutes idles the gang."""
    wait = scheduling.eviction_seconds if seconds is None else seconds
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


def apart_from(labels: dict[str, str]) -> dict[str, Any]:
    """Affinity: on no node that has a pod with these labels."""
    term = {"labelSelector": {"matchLabels": labels}, "topologyKey": "kubernetes.io/hostname"}
    return {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}


def beside(labels: dict[str, str], alone: dict[str, str] | None) -> dict[str, Any]:
    """Affinity: on a node that has a pod with these labels; with ``alone`` on none that has one of those."""
    host = "kubernetes.io/hostname"
    term = {"labelSelector": {"matchLabels": labels}, "topologyKey": host}
    together = {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    return together | (apart_from(alone) if alone else {})


def packed(labels: dict[str, str], key: str, hosts: int) -> dict[str, Any]:
    """Affinity: pods of a pool fill leaf by leaf; the pods of an engine of several hosts share one
    leaf, which is required, not preferred."""
    mine = {"labelSelector": {"matchLabels": labels}, "topologyKey": key}
    terms: dict[str, Any] = {
        "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": mine}]
    }
    if hosts > 1:
        together = mine | {"matchLabelKeys": [names.REPLICA_NAME]}
        terms["requiredDuringSchedulingIgnoredDuringExecution"] = [together]
    return {"podAffinity": terms}


def prefer_leaves(key: str, leaves: Leaves) -> dict[str, Any]:
    """Affinity of training pods: their leaves if possible, never those that engines need whole."""
    if not leaves.trainer:
        return {}
    rule = {"key": key, "operator": "In", "values": list(leaves.trainer)}
    preferred = {"weight": 100, "preference": {"matchExpressions": [rule]}}
    terms: dict[str, Any] = {"preferredDuringSchedulingIgnoredDuringExecution": [preferred]}
    if leaves.reserved:
        terms |= _required(key, "NotIn", leaves.reserved)
    return {"nodeAffinity": terms}


def bind_to_leaf(spec: dict[str, Any], key: str, leaf: str) -> None:
    """Let the pod run in this leaf only."""
    spec.setdefault("affinity", {})["nodeAffinity"] = _required(key, "In", [leaf])


def off_gpu_nodes() -> dict[str, Any]:
    """Affinity of pods without a GPU in a cluster that has some."""
    return {"nodeAffinity": _required(GPU_NODE, "NotIn", ["true"])}


def _required(key: str, operator: str, values: Sequence[str]) -> dict[str, Any]:
    rule = {"key": key, "operator": operator, "values": list(values)}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [rule]}]}
    return {"requiredDuringSchedulingIgnoredDuringExecution": terms}


def add_devices(container: dict[str, Any], scheduling: SchedulingSpec) -> None:
    """RDMA devices, the right to pin memory for them, NCCL's environment and a large /dev/shm."""
    rdma = scheduling.rdma
    if rdma is not None:
        for kind in ("requests", "limits"):
            container["resources"][kind] = container["resources"][kind] | {rdma.resource: str(rdma.count)}
        container["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}}
    have = {variable["name"] for variable in container["env"]}
    container["env"] += [
        {"name": name, "value": value} for name, value in scheduling.nccl_env.items() if name not in have
    ]
    container["volumeMounts"].append({"name": "shm", "mountPath": "/dev/shm"})


def see_all_devices(container: dict[str, Any], scheduling: SchedulingSpec) -> None:
    """All GPUs of the node without asking for one: another pod has them, and takes turns with this one."""
    taken = {GPU} | ({scheduling.rdma.resource} if scheduling.rdma else set())
    resources = container["resources"]
    for kind in ("requests", "limits"):
        resources[kind] = {name: value for name, value in resources[kind].items() if name not in taken}
    container["env"].append({"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"})


def open_to_neighbours(spec: dict[str, Any]) -> None:
    """Let processes of other pods of the node read this pod's GPU memory: CUDA IPC asks for common process
    numbers and a common /dev/shm."""
    spec |= {"hostIPC": True, "hostPID": True}
    spec["volumes"] = [volume for volume in spec["volumes"] if volume["name"] != "shm"]
    for container in spec["containers"]:
        container["volumeMounts"] = [m for m in container["volumeMounts"] if m["name"] != "shm"]


def shared_memory(scheduling: SchedulingSpec) -> dict[str, Any]:
    return {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": scheduling.shared_memory}}


def cluster_labels(scheduling: SchedulingSpec) -> dict[str, str]:
    """Labels of the RayCluster from which Kueue, and KubeRay's gang schedulers, take the queue."""
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
