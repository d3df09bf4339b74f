"""A real API server with KubeRay and KWOK, and the operator as a process; no node of its own."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import yaml

from grpo_devcluster import cluster
from grpo_devcluster.fakenodes import fake_node
from grpo_devcluster.operator_process import install_crds
from grpo_devcluster.paths import KUBECONFIG, REPO
from support.api_proxy import ApiProxy
from support.api_server import Api, Operator, until


@pytest.fixture(scope="session")
def api() -> Iterator[Api]:
    cluster.down()
    cluster.up(with_node=False)
    install_crds()
    yield Api()
    cluster.down()


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
    """The tiny manifest, for a test to change and apply.

    Its job is deleted after the test and before the nodes, since pods of a deleted node linger.
    """
    manifest = yaml.safe_load((REPO / "manifests" / "tiny-moe.yaml").read_text())
    yield manifest
    api.run("delete", "grpojobs,rolloutpools", "--all", "--wait", "--timeout=60s")
    # The garbage collector learns of new kinds only every 30 seconds.
    left = "rayclusters,pods" if api.run("get", "rayclusters").returncode == 0 else "pods"
    until("nothing is left", lambda: not api.get(left)["items"], 90)


@pytest.fixture(scope="module")
def proxy(api: Api, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiProxy]:
    """An API server that fails on demand, for the modules whose operator goes through it."""
    made = ApiProxy(KUBECONFIG, tmp_path_factory.mktemp("proxy"))
    yield made
    made.stop()
