"""A cluster without KubeRay: jobs report it, and start once it is installed."""

from collections.abc import Iterator
from typing import Any

import pytest

from grpo_devcluster.gobuild import module_directory
from grpo_devcluster.operator_process import operator_process
from support.api_server import WHOLE, Api, running, until

CRD = "crd/rayclusters.ray.io"


@pytest.fixture(scope="module", autouse=True)
def operator(api: Api, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An operator that starts without KubeRay.

    Deleting the CRDs of a running operator leads to the same state: kopf exits and kubelet restarts it.
    """
    api.ok("delete", CRD)
    until("RayClusters are unknown", lambda: api.run("get", "rayclusters").returncode != 0, 30)
    with operator_process(tmp_path_factory.mktemp("operator")) as process:
        yield process
        assert process.poll() is None, "the operator died"
    _install(api)


def _install(api: Api) -> None:
    source = module_directory("kuberay", "github.com/ray-project/kuberay/ray-operator")
    api.ok("apply", "--server-side", "--force-conflicts", "-f", str(source / "config" / "crd" / "bases"))
    until("RayClusters are known", lambda: api.run("get", "rayclusters").returncode == 0, 30)


@pytest.mark.fault(
    row="kuberay",
    point="KubeRay's kinds are not installed when a job is created",
    witness="reason KubeRayMissing",
    bound="named in 30 s, runs in 120 s after it",
    partial="KubeRay's operator does not go away under a running job",
)
def test_a_job_waits_for_kuberay(api: Api, tiny: dict[str, Any], fake_nodes: Any) -> None:
    fake_nodes(2)
    assert api.apply(tiny).returncode == 0

    def reason() -> str | None:
        status = api.get("grpojob", "tiny-moe").get("status") or {}
        return next((c["reason"] for c in status.get("conditions", [])), None)

    until("the job says what is missing", lambda: reason() == "KubeRayMissing", 30)
    _install(api)
    until("all pods run", lambda: running(api) == WHOLE, 120)
