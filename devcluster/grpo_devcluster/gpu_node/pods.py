"""Pods that use GPUs, and what is expected of them (pure)."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_devcluster.nvidia import RESOURCE

# Prints one line of JSON: the GPUs that the pod sees, and the error of a product of matrices of ones.
PROGRAM = """
import glob, json, torch
gpus = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
ones = torch.ones(4096, 4096, device="cuda", dtype=torch.bfloat16)
error = float((ones @ ones / 4096 - 1).float().abs().max())
nodes = sorted(glob.glob("/dev/nvidia[0-9]*"))
print(json.dumps({"gpus": gpus, "error": error, "nodes": nodes, "name": torch.cuda.get_device_name()}))
"""


def gpu_pod(
    name: str, image: str, gpus: int, command: Sequence[str], mounts: Sequence[Path]
) -> dict[str, Any]:
    """Return a pod without privileges that asks for GPUs and runs a command in the machine's environment."""
    volumes = [
        {"name": f"host-{i}", "hostPath": {"path": str(path), "type": "Directory"}}
        for i, path in enumerate(mounts)
    ]
    volume_mounts = [
        {"name": f"host-{i}", "mountPath": str(path), "readOnly": True} for i, path in enumerate(mounts)
    ]
    container = {
        "name": "gpu",
        "image": image,
        "imagePullPolicy": "Never",
        "command": list(command),
        "env": [{"name": "HOME", "value": "/tmp"}],
        "resources": {"limits": {RESOURCE: str(gpus), "cpu": "2", "memory": "16Gi"}},
        "volumeMounts": volume_mounts,
    }
    spec = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "containers": [container],
        "volumes": volumes,
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def faults(logs: Mapping[str, str], gpus: int) -> list[str]:
    """Return what is wrong with the output of pods that ran at the same time with ``gpus`` GPUs each."""
    found = []
    owners: dict[str, str] = {}
    for pod, log in logs.items():
        seen = _last_record(log)
        if seen is None:
            found.append(f"{pod} printed no record: {log[-300:]!r}")
            continue
        if len(seen["gpus"]) != gpus or len(seen["nodes"]) != gpus:
            found.append(f"{pod} asked for {gpus} GPUs and sees {seen['gpus']} at {seen['nodes']}")
        if seen["error"] > 0:
            found.append(f"{pod}: the product of ones is wrong by {seen['error']}")
        found += [f"{pod} and {owners[gpu]} both have {gpu}" for gpu in seen["gpus"] if gpu in owners]
        owners |= dict.fromkeys(seen["gpus"], pod)
    return found


def _last_record(log: str) -> dict[str, Any] | None:
    for line in reversed(log.splitlines()):
        if line.startswith("{"):
            record: dict[str, Any] = json.loads(line)
            return record
    return None


def waits_for_gpus(pod: Mapping[str, Any]) -> str:
    """Return the scheduler's message if a pod is pending because the node has too few GPUs, else ""."""
    status = pod.get("status", {})
    for condition in status.get("conditions", []) if status.get("phase") == "Pending" else []:
        message = str(condition.get("message", ""))
        if condition["type"] == "PodScheduled" and f"Insufficient {RESOURCE}" in message:
            return message
    return ""
