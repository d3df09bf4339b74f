"""Nodes of KWOK that lose their power: nobody reports for them, and nobody confirms a deletion."""

import json
from datetime import UTC, datetime

from support.api_server import Api

# KWOK leaves nodes and pods with this annotation alone, as a kubelet without power does.
_ANNOTATION = "kwok.x-k8s.io/status"
_UNATTENDED = f"{_ANNOTATION}=custom"


def power_off(api: Api, *nodes: str) -> None:
    """Stop all reports of these nodes.

    kube-controller-manager would set the condition itself after --node-monitor-grace-period. Everything
    after that is its own work: the taint, the eviction, and pods that stay Terminating.
    """
    api.ok("annotate", "nodes", *nodes, "--overwrite", _UNATTENDED)
    for node in nodes:
        field = f"--field-selector=spec.nodeName={node}"
        api.ok("annotate", "pods", "--all-namespaces", "--overwrite", field, _UNATTENDED)
        _set_ready(api, node, "Unknown", "NodeStatusUnknown", "Kubelet stopped posting node status.")


def power_on(api: Api, *nodes: str) -> None:
    """Let the nodes report again; their pods that were deleted meanwhile are confirmed."""
    for node in nodes:
        _set_ready(api, node, "True", "KubeletReady", "kubelet is posting ready status")
        field = f"--field-selector=spec.nodeName={node}"
        api.ok("annotate", "pods", "--all-namespaces", field, f"{_ANNOTATION}-")
        api.ok("annotate", "node", node, f"{_ANNOTATION}-")


def _set_ready(api: Api, node: str, status: str, reason: str, message: str) -> None:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    condition = {
        "type": "Ready", "status": status, "reason": reason, "message": message,
        "lastHeartbeatTime": now, "lastTransitionTime": now,
    }  # fmt: skip
    patch = json.dumps({"status": {"conditions": [condition]}})
    api.ok("patch", "node", node, "--subresource=status", "--type=strategic", "-p", patch)
