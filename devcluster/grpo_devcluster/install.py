"""Installs the operator with Helm, into the devcluster or into the user's own cluster."""

import json
import tempfile
from pathlib import Path
from typing import Any

from grpo_devcluster.addons import kubectl
from grpo_devcluster.gobuild import binary
from grpo_devcluster.paths import REPO
from grpo_devcluster.pod_overlay import pod_overlay
from grpo_devcluster.stages import run

CHART = REPO / "helm" / "grpo-operator"
NAMESPACE = "grpo-system"
# Stores of the manifests for the devcluster are directories of its node.
PATHS_OF_NODES = {"pods": {"allow": ["hostPath"]}}


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
    return {
        "image": {"repository": repository, "tag": tag, "pullPolicy": "Never"},
        "replicas": 1,  # a second one on the same node would only take memory
        "allNamespaces": True,
        "admissionPolicies": PATHS_OF_NODES,
        "images": {"trainer": images["trainer"], "rollout": images["rollout"], "pullPolicy": "IfNotPresent"},
        "podOverlay": pod_overlay(),
    }
