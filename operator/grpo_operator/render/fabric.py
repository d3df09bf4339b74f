"""Connection of GPU pods to the RDMA fabric (pure)."""

from typing import Any

from grpo_operator.api.v1alpha1.rdma import RdmaSpec
from grpo_operator.render.placement import same_host

NETWORKS = "k8s.v1.cni.cncf.io/networks"  # annotation from which Multus reads a pod's further networks


def connect(pod: dict[str, Any], rdma: RdmaSpec | None, root: bool) -> None:
    """Give the first container of a pod template RDMA devices, and the pod the networks to use them in.

    ``root``: its user is root.
    """
    if rdma is None:
        return
    container = pod["spec"]["containers"][0]
    devices = {device.resource: str(device.count) for device in rdma.devices}
    for kind in ("requests", "limits"):
        container["resources"][kind] = container["resources"][kind] | devices
    # RDMA registers memory, which pins it. Without the capability the limit is a few MiB, unless the node's
    # container runtime raises it. Kubernetes gives processes of other users than root no capability.
    if root:
        container["securityContext"] = {"capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]}}
    if rdma.networks:
        pod["metadata"]["annotations"][NETWORKS] = ",".join(rdma.networks)
    if rdma.host_network:
        _use_host_network(pod["spec"], pod["metadata"]["labels"])


def _use_host_network(spec: dict[str, Any], labels: dict[str, str]) -> None:
    """Move a pod to the network of its host, and away from pods with its labels or whose hosts it avoids.

    Their ports are fixed, so two of them could not listen on one host.
    """
    spec |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}  # Host would resolve no services
    apart = spec.setdefault("affinity", {}).setdefault("podAntiAffinity", {})
    avoided = apart.pop("preferredDuringSchedulingIgnoredDuringExecution", [])
    terms = apart.setdefault("requiredDuringSchedulingIgnoredDuringExecution", [])
    terms += [*(term["podAffinityTerm"] for term in avoided), same_host(dict(labels))]
