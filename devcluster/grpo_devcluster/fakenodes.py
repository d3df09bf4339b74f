"""Nodes that KWOK simulates, and a volume that their pods can mount."""

from typing import Any

LEAF = "topology.kubernetes.io/leaf"


def fake_node(name: str, labels: dict[str, str], capacity: dict[str, str]) -> dict[str, Any]:
    """Return a node that KWOK keeps Ready. ``capacity``: allocatable resources in addition to 110 pods."""
    capacity = {"pods": "110"} | capacity
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "annotations": {"kwok.x-k8s.io/node": "fake"},
            "labels": {"kubernetes.io/hostname": name} | labels,
        },
        "status": {"capacity": capacity, "allocatable": capacity},
    }


def gpu_cluster(leaves: int = 8, nodes_per_leaf: int = 8, cpu_nodes: int = 2) -> list[dict[str, Any]]:
    """Return nodes with 8 GPUs, leaf and rack labels, and CPU nodes."""
    cpu = {"cpu": "128", "memory": "2Ti"}
    nodes = [fake_node(f"cpu-{index}", {}, cpu) for index in range(cpu_nodes)]
    devices = cpu | {"nvidia.com/gpu": "8", "rdma/hca": "8"}
    for leaf in range(leaves):
        labels = {LEAF: f"leaf-{leaf}", "rack": f"rack-{leaf // 2}", "nvidia.com/gpu.present": "true"}
        nodes += [fake_node(f"gpu-{leaf}-{i}", labels, devices) for i in range(nodes_per_leaf)]
    return nodes


def volume(name: str, namespace: str = "default") -> list[dict[str, Any]]:
    """Return a PersistentVolume and the claim ``name`` bound to it."""
    size = {"storage": "100Ti"}
    source = {
        "capacity": size,
        "accessModes": ["ReadWriteMany"],
        "storageClassName": "",
        "hostPath": {"path": f"/tmp/{name}"},
        "claimRef": {"namespace": namespace, "name": name},
    }
    claim = {"accessModes": ["ReadWriteMany"], "storageClassName": "", "resources": {"requests": size}}
    metadata = {"name": name, "namespace": namespace}
    return [
        {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": source},
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": claim},
    ]
