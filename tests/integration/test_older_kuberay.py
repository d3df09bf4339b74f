"""KubeRay 1.5.1 in place of 1.6.2: the same jobs run; features of 1.6 are refused by name."""

from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from grpo_devcluster import processes
from grpo_devcluster.addons import start_kuberay
from grpo_devcluster.fakenodes import gpu_cluster, volume
from grpo_devcluster.gobuild import build_all
from grpo_devcluster.paths import REPO
from support.api_server import WHOLE, Api, lose_controller, running, until

pytestmark = pytest.mark.slow  # builds a second KubeRay
OLD = "kuberay-operator-1.5"
CRD = "crd/rayclusters.ray.io"
FIELDS = "/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties"


@pytest.fixture(scope="module", autouse=True)
def kuberay(api: Api) -> Iterator[None]:
    """Multi-node engines need replica labels, which KubeRay 1.5 has behind a feature gate."""
    build_all((OLD,))
    processes.stop("kuberay-operator")
    api.ok("delete", CRD)
    until("the CRD is gone", lambda: api.run("get", CRD).returncode != 0, 30)
    start_kuberay(OLD, "RayMultiHostIndexing=true")
    until("RayClusters are known", lambda: api.run("get", "rayclusters").returncode == 0, 30)
    yield
    processes.stop("kuberay-operator")
    start_kuberay()


@pytest.fixture(scope="module", autouse=True)
def operator(kuberay: None, operator: Any) -> Any:
    """An operator that starts after the older KubeRay is installed."""
    return operator


def test_the_older_kuberay_is_installed(api: Api) -> None:
    (version,) = [v for v in api.get(CRD)["spec"]["versions"] if v["name"] == "v1"]
    fields = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    assert "authOptions" in fields and "upgradeStrategy" not in fields


def test_a_job_starts_scales_and_suspends(api: Api, tiny: dict[str, Any], fake_nodes: Any) -> None:
    fake_nodes(2)
    assert api.apply(tiny).returncode == 0
    until("all pods run", lambda: running(api) == WHOLE, 60)
    api.ok("scale", "rpool", "tiny-moe-rollout", "--replicas=3")
    until("three engines", lambda: running(api)["rollout"] == 3, 60)
    tiny["spec"]["suspend"] = True
    assert api.apply(tiny).returncode == 0
    lose_controller(api, "tiny-moe")
    until("no pod is left", lambda: not api.get("pods")["items"], 60)


def test_an_upgrade_strategy_needs_kuberay_1_6(api: Api, tiny: dict[str, Any], fake_nodes: Any) -> None:
    fake_nodes(2)
    tiny["spec"]["upgradeStrategy"] = "Recreate"
    assert api.apply(tiny).returncode == 0

    def message() -> str:
        conditions = api.get("grpojob", "tiny-moe").get("status", {}).get("conditions", [])
        return next((c["message"] for c in conditions if c["reason"] == "KubeRayTooOld"), "")

    assert "upgradeStrategy=Recreate needs KubeRay 1.6" in until("the reason", message, 30)


def test_engines_of_several_pods_are_whole(api: Api) -> None:
    objects = [*gpu_cluster(), *volume("grpo-checkpoints")]
    api.ok("apply", "-f", "-", stdin=yaml.safe_dump_all(objects))
    job = yaml.safe_load((REPO / "manifests" / "deepseek-v3-512xh100.yaml").read_text())
    try:
        assert api.apply(job).returncode == 0
        until("all pods run", lambda: running(api)["trainer"] == 32 and running(api)["rollout"] == 32, 180)
        status = until("status", lambda: api.get("grpojob", job["metadata"]["name"]).get("status"))
        until("8 engines", lambda: _rollout(api, job) == "8/8", 30)
        assert status["phase"] == "Starting"
    finally:
        api.run("delete", "grpojobs", "--all", "--wait", "--timeout=60s")
        until("no pod is left", lambda: not api.get("pods")["items"], 120)
        api.ok("delete", "-f", "-", "--ignore-not-found", stdin=yaml.safe_dump_all(objects))


def _rollout(api: Api, job: dict[str, Any]) -> str | None:
    ready: str | None = api.get("grpojob", job["metadata"]["name"]).get("status", {}).get("rolloutReady")
    return ready
