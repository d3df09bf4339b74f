"""A real API server with KubeRay and KWOK, and the operator as a process; no node of its own."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_devcluster import cluster
from grpo_devcluster.gobuild import binary
from grpo_devcluster.paths import KUBECONFIG, REPO
from grpo_devcluster.stages import wait_for

SETTINGS = {"images": {"trainer": "localhost/trainer:test", "rollout": "localhost/rollout:test"}}


class Api:
    """kubectl against the test's API server."""

    def run(self, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        command = [str(binary("kubectl")), f"--kubeconfig={KUBECONFIG}", *arguments]
        return subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)

    def ok(self, *arguments: str, stdin: str | None = None) -> str:
        done = self.run(*arguments, stdin=stdin)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def get(self, *arguments: str) -> dict[str, Any]:
        return dict(json.loads(self.ok("get", *arguments, "-o", "json")))

    def apply(self, manifest: dict[str, Any]) -> subprocess.CompletedProcess[str]:
        return self.run("apply", "-f", "-", stdin=yaml.safe_dump(manifest))


@pytest.fixture(scope="session")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    cluster.down()
    cluster.up(with_node=False)
    api = Api()
    api.ok("apply", "--server-side", "-f", str(REPO / "crds"))
    wait_for("GRPOJob", lambda: api.run("get", "grpojobs,rolloutpools").returncode == 0, 30)
    settings = tmp_path_factory.mktemp("operator") / "settings.json"
    settings.write_text(json.dumps(SETTINGS))
    env = os.environ | {"KUBECONFIG": str(KUBECONFIG), "GRPO_SETTINGS": str(settings)}
    log = settings.with_name("operator.log").open("w")
    command = [sys.executable, "-m", "kopf", "run", "--standalone", "-A"]
    operator = subprocess.Popen(
        [*command, "--module=grpo_operator.handlers.main"], env=env, stdout=log, stderr=log
    )
    yield api
    operator.terminate()
    operator.wait(20)
    cluster.down()


@pytest.fixture
def fake_nodes(api: Api) -> Iterator[Callable[[int], None]]:
    """Add KWOK nodes of 8 GPUs, 64 cores and 512 GiB; gone after the test."""

    def add(count: int) -> None:
        for index in range(count):
            api.ok("apply", "-f", "-", stdin=yaml.safe_dump(_node(index)))

    yield add
    api.ok("delete", "nodes", "--all")


def _node(index: int) -> dict[str, Any]:
    room = {"cpu": "64", "memory": "512Gi", "pods": "110", "nvidia.com/gpu": "8"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": f"fake-{index}",
            "annotations": {"kwok.x-k8s.io/node": "fake"},
            "labels": {"kubernetes.io/hostname": f"fake-{index}"},
        },
        "status": {"capacity": room, "allocatable": room},
    }


@pytest.fixture
def tiny(api: Api) -> Iterator[dict[str, Any]]:
    """The tiny manifest, to be changed and applied; its job is deleted after the test."""
    manifest = yaml.safe_load((REPO / "manifests" / "tiny-moe.yaml").read_text())
    yield manifest
    api.run("delete", "grpojobs,rolloutpools", "--all", "--wait", "--timeout=60s")


def until(what: str, check: Callable[[], Any], timeout: float = 30) -> Any:
    """Poll until true; the value. Raises AssertionError with ``what``."""
    deadline = time.monotonic() + timeout
    while not (value := check()):
        assert time.monotonic() < deadline, f"not within {timeout:.0f} s: {what}"
        time.sleep(0.2)
    return value


def manifests() -> list[Path]:
    return sorted((REPO / "manifests").glob("*.yaml"))
