"""Runs the operator as a process of this machine, with the devcluster's API server."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from grpo_devcluster.addons import kubectl, served
from grpo_devcluster.paths import KUBECONFIG, REPO
from grpo_devcluster.stages import wait_for

_SETTINGS: dict[str, object] = {
    "images": {"trainer": "localhost/trainer:test", "rollout": "localhost/rollout:test"},
    "namespace": "default",
}


def install_crds() -> None:
    """Install the CRDs and wait until they are served."""
    kubectl("apply", "--server-side", "-f", REPO / "crds")
    wait_for("GRPOJob", lambda: served("grpojobs,rolloutpools"), 30)


@contextmanager
def operator_process(
    directory: Path,
    kubeconfig: Path = KUBECONFIG,
    namespaces: Sequence[str] = (),
    changes: Mapping[str, object] | None = None,
    env: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run the operator until the block ends. Its settings and log are in ``directory``.

    ``namespaces``: the namespaces that it watches; empty means all. ``changes``: to its settings. ``env``:
    additional environment variables.
    """
    settings = directory / "settings.json"
    settings.write_text(json.dumps(_SETTINGS | {"watchNamespaces": list(namespaces)} | dict(changes or {})))
    own = {"KUBECONFIG": str(kubeconfig), "GRPO_SETTINGS": str(settings)}
    own["MALLOC_ARENA_MAX"] = "2"  # as in the image
    command = [
        sys.executable,
        "-m",
        "kopf",
        "run",
        "--standalone",
        *([f"--namespace={name}" for name in namespaces] or ["-A"]),
        "--module=grpo_operator.handlers.main",
    ]
    with (directory / "operator.log").open("a") as log:
        process = subprocess.Popen(command, env=os.environ | own | dict(env or {}), stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.terminate()
            process.wait(20)
