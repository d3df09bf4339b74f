"""The installed release answers to its own test."""

import subprocess
from pathlib import Path

from grpo_devcluster.gobuild import binary
from grpo_devcluster.install import NAMESPACE


def test_helm_test_passes(kubeconfig: Path) -> None:
    command = [str(binary("helm")), "test", "grpo-operator", "-n", NAMESPACE, "--timeout", "2m"]
    done = subprocess.run(
        [*command, f"--kubeconfig={kubeconfig}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "Succeeded" in done.stdout, done.stdout + done.stderr
