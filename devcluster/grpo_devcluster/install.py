"""Installs the operator with Helm, into the devcluster or into the user's own cluster."""

import json
import tempfile
from pathlib import Path
from typing import Any

from grpo_devcluster import nvidia
from grpo_devcluster.addons import kubectl
from grpo_devcluster.gobuild import binary
from grpo_devcluster.images import environment, environment_mounts
from grpo_devcluster.packed import SITE
from grpo_devcluster.paths import PACK, REPO
from grpo_devcluster.stages import run

CHART = REPO / "helm" / "grpo-operator"
NAMESPACE = "grpo-system"
TOOLKIT = Path("/usr/local/cuda")
PACKAGES = Path("/opt/grpo-packages")  # on PYTHONPATH in the images of trainers and engines


def install_operator(kubeconfig: Path, values: dict[str, Any]) -> None:
    """Run ``helm upgrade --install`` and wait until the operator is ready."""
    _require_kuberay(kubeconfig)
    # Helm installs CRDs but never upgrades them.
    kubectl("apply", "--server-side", "--force-conflicts", "-f", REPO / "crds", kubeconfig=kubeconfig)
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(values, file)
        file.flush()
        run(
            [
                binary("helm"), "upgrade", "--install", "grpo-operator", CHART, "--skip-crds",
                "--kubeconfig", kubeconfig, "--namespace", NAMESPACE, "--create-namespace",
                "--values", file.name, "--wait", "--timeout", "3m",
            ],
            step="helm install grpo-operator",
            remedy=f"See: kubectl --kubeconfig {kubeconfig} -n {NAMESPACE} describe pods",
        )  # fmt: skip


def _require_kuberay(kubeconfig: Path) -> None:
    command = [binary("kubectl"), f"--kubeconfig={kubeconfig}", "get", "crd", "rayclusters.ray.io"]
    remedy = "Install KubeRay 1.5.1 or newer first: https://docs.ray.io/en/latest/cluster/kubernetes"
    run(command, step="looking for KubeRay", remedy=remedy)


def devcluster_values(images: dict[str, str]) -> dict[str, Any]:
    """Return chart values for the devcluster: its images, and the host's Python environment in pods."""
    repository, tag = images["operator"].rsplit(":", 1)
    mounts = {path: path for path in environment_mounts()}
    if PACK is not None and (PACK / SITE).is_dir():
        mounts[PACK / SITE] = PACKAGES
    volumes = [
        {"name": f"python-{i}", "hostPath": {"path": str(path), "type": "Directory"}}
        for i, path in enumerate(mounts)
    ]
    volume_mounts = [
        {"name": f"python-{i}", "mountPath": str(path), "readOnly": True}
        for i, path in enumerate(mounts.values())
    ]
    path = f"{environment() / 'bin'}:{PACKAGES / 'bin'}:/usr/local/bin:/usr/bin:/bin"
    return {
        "image": {"repository": repository, "tag": tag, "pullPolicy": "Never"},
        "replicas": 1,  # a second one on the same node would only take memory
        "images": {"trainer": images["trainer"], "rollout": images["rollout"], "pullPolicy": "Never"},
        "podOverlay": {
            "volumes": volumes,
            "volumeMounts": volume_mounts,
            "env": [{"name": "PATH", "value": path}, *_libraries()],
        },
    }


def _libraries() -> list[dict[str, str]]:
    """Return the variable that leads to CUDA's libraries in the environment; images of GPUs have it, too."""
    if not nvidia.present():
        return []
    folders = sorted(environment().glob("lib/python*/site-packages/nvidia/*/lib"))
    found = {"LD_LIBRARY_PATH": ":".join(map(str, folders))}
    if TOOLKIT.is_dir():
        found["CUDA_HOME"] = str(TOOLKIT.resolve())
    return [{"name": name, "value": value} for name, value in found.items()]
