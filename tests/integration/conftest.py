"""A real API server with KubeRay and KWOK, and the operator as a process; no node of its own."""

import json
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from fault_proxy import FaultProxy

from grpo_devcluster import cluster
from grpo_devcluster.fakenodes import fake_node
from grpo_devcluster.gobuild import binary
from grpo_devcluster.operator_process import install_crds, operator_process
from grpo_devcluster.paths import KUBECONFIG, REPO


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
def api() -> Iterator[Api]:
    cluster.down()
    cluster.up(with_node=False)
    install_crds()
    yield Api()
    cluster.down()


class Operator:
    """The operator's process, which a test may replace."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._directory = directory
        self._stack = stack
        self.process = stack.enter_context(operator_process(directory))

    def restart(self) -> None:
        self.process.terminate()
        self.process.wait(20)
        self.process = self._stack.enter_context(operator_process(self._directory))


@pytest.fixture(scope="module", autouse=True)
def operator(api: Api, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An operator for each module, so that a module may run it in its own way."""
    with ExitStack() as stack:
        running = Operator(tmp_path_factory.mktemp("operator"), stack)
        yield running
        assert running.process.poll() is None, "the operator died"


@pytest.fixture
def fake_nodes(api: Api) -> Iterator[Callable[[int], None]]:
    """Add KWOK nodes of 8 GPUs, 64 cores and 512 GiB; gone after the test."""

    room = {"cpu": "64", "memory": "512Gi", "nvidia.com/gpu": "8"}

    def add(count: int) -> None:
        for index in range(count):
            node = fake_node(f"fake-{index}", {}, room)
            api.ok("apply", "-f", "-", stdin=yaml.safe_dump(node))

    yield add
    api.ok("delete", "nodes", "--all")


@pytest.fixture
def tiny(api: Api, fake_nodes: Any) -> Iterator[dict[str, Any]]:
    """The tiny manifest, to be changed and applied; its job is deleted after the test, before the
    nodes: pods of a node that is gone linger."""
    manifest = yaml.safe_load((REPO / "manifests" / "tiny-moe.yaml").read_text())
    yield manifest
    api.run("delete", "grpojobs,rolloutpools", "--all", "--wait", "--timeout=60s")
    # The garbage collector learns of new kinds only every 30 seconds.
    left = "rayclusters,pods" if api.run("get", "rayclusters").returncode == 0 else "pods"
    until("nothing is left", lambda: not api.get(left)["items"], 90)


def until(what: str, check: Callable[[], Any], timeout: float = 30) -> Any:
    """Poll until true; the value. Raises AssertionError with ``what``."""
    deadline = time.monotonic() + timeout
    while not (value := check()):
        assert time.monotonic() < deadline, f"not within {timeout:.0f} s: {what}"
        time.sleep(0.2)
    return value


@pytest.fixture(scope="module")
def proxy(api: Api, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultProxy]:
    """An API server that fails on demand, for the modules whose operator goes through it."""
    made = FaultProxy(KUBECONFIG, tmp_path_factory.mktemp("proxy"))
    yield made
    made.stop()


POOL = "rl.grpo.dev/pool"
WHOLE = Counter({"head": 1, "controller": 1, "trainer": 2, "rollout": 2})


def running(api: Api) -> Counter[str]:
    """Number of running pods of each pool."""
    items = api.get("pods")["items"]
    return Counter(p["metadata"]["labels"][POOL] for p in items if p["status"].get("phase") == "Running")


def lose_controller(api: Api, job: str) -> None:
    """Leave the job without a running controller. KWOK's answers nobody, so a suspended job would
    wait for its checkpoint for ever; without a controller there is nothing to wait for."""
    nodes = api.ok("get", "nodes", "-o", "name").split()
    api.ok("cordon", *(node.removeprefix("node/") for node in nodes))
    api.ok("delete", "pod", "-l", f"rl.grpo.dev/job={job},{POOL}=controller")


def manifests() -> list[Path]:
    return sorted((REPO / "manifests").glob("*.yaml"))
