"""A cluster of one node, which has all the GPUs: every pod of a job finds its place on it."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_devcluster import nvidia
from grpo_devcluster.fakenodes import fake_node
from grpo_devcluster.paths import REPO
from support.api_server import Api, until

FILES = sorted((REPO / "manifests" / "gpu").glob("*.yaml"))
LABELS = {"nvidia.com/gpu.present": "true"}


@pytest.fixture
def node(api: Api, request: pytest.FixtureRequest) -> Iterator[None]:
    gpus = request.param
    room = {"cpu": f"{16 * gpus}", "memory": f"{120 * gpus}Gi", "nvidia.com/gpu": f"{gpus}"}
    objects = [fake_node("only", LABELS, room), nvidia.runtime_class()]
    api.ok("apply", "-f", "-", stdin=yaml.safe_dump_all(objects))
    yield
    api.run("delete", "grpojobs", "--all", "--wait", "--timeout=60s")
    until("no pod is left", lambda: not api.get("pods")["items"], 120)
    api.ok("delete", "-f", "-", "--ignore-not-found", stdin=yaml.safe_dump_all(objects))


def _gpus(file: Path) -> int:
    return int(file.stem.rsplit("-", 1)[1].removesuffix("gpu"))


def _running(api: Api) -> list[dict[str, Any]]:
    return [pod for pod in api.get("pods")["items"] if pod["status"].get("phase") == "Running"]


@pytest.mark.parametrize(
    ("node", "file"),
    [pytest.param(_gpus(file), file, id=file.stem) for file in FILES],
    indirect=["node"],
)
def test_all_pods_of_a_first_job_run(api: Api, node: None, file: Path) -> None:
    assert api.apply(yaml.safe_load(file.read_text())).returncode == 0
    manifest = yaml.safe_load(file.read_text())
    engines = manifest["spec"]["rollout"]["template"].get("replicas", 1)
    pools = [
        "controller",
        "head",
        *["rollout"] * engines,
        *["trainer"] * manifest["spec"]["trainer"]["nodes"],
    ]
    until("all pods run", partial(_has_pools, api, pools), 120)
    used = [_gpus_of(pod) for pod in _running(api)]
    assert sum(used) == _gpus(file), "each GPU is requested once"


def _has_pools(api: Api, pools: list[str]) -> bool:
    return sorted(pod["metadata"]["labels"]["rl.grpo.dev/pool"] for pod in _running(api)) == pools


def _gpus_of(pod: dict[str, Any]) -> int:
    limits = [container["resources"].get("limits", {}) for container in pod["spec"]["containers"]]
    return sum(int(limit.get("nvidia.com/gpu", 0)) for limit in limits)
