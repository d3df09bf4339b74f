"""Three ways of GPU pods to the RDMA fabric, as device plugins, Multus and Kubernetes expect them."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.rdma import RdmaSpec
from grpo_operator.api.v1alpha1.rolloutpool import RolloutPoolSpec
from grpo_operator.api.v1alpha1.scheduling import NCCL_DEFAULTS
from grpo_operator.plan.capacity.pod_requests import job_requests
from grpo_operator.render.fabric import NETWORKS
from grpo_operator.render.ray_cluster import job_cluster, pool_cluster
from grpo_operator.settings import OperatorSettings
from support.objects import pool_of

MANIFEST = Path(__file__).parents[4] / "manifests" / "deepseek-v3-512xh100.yaml"
GPU_POOLS = ("trainer", "rollout")
MAIN = {"trainer": "ray-worker", "rollout": "engine"}
SHARED = {"devices": [{"resource": "rdma/hca_shared_devices_a"}]}
RAILS = {
    "devices": [{"resource": f"nvidia.com/sriov_rail{rail}"} for rail in range(8)],
    "networks": [f"fabric/rail-{rail}" for rail in range(8)],
}
HOST = {"hostNetwork": True}
# How Multus reads one item of its annotation: NAMESPACE/NAME@INTERFACE, all but the name optional.
MULTUS_ITEM = re.compile(r"(?:([a-z0-9](?:[-a-z0-9]*[a-z0-9])?)/)?([a-z0-9](?:[-a-z0-9]*[a-z0-9])?)")


def templates(rdma: dict[str, Any], **scheduling: Any) -> dict[str, dict[str, Any]]:
    """Return the pod templates of the 512-GPU job, whose engines span four pods, by group; and its head's."""
    manifest = yaml.safe_load(MANIFEST.read_text())
    manifest["metadata"] |= {"namespace": "rl", "uid": "12345678-aaaa", "generation": 1}
    manifest["spec"]["scheduling"] |= {"rdma": rdma} | scheduling
    spec = GRPOJobSpec.model_validate(manifest["spec"])
    settings = OperatorSettings("trainer:1", "rollout:1")
    cluster = job_cluster(manifest, spec, pool_of(spec), settings, False).wire()["spec"]
    groups = {group["groupName"]: group["template"] for group in cluster["workerGroupSpecs"]}
    return groups | {"head": cluster["headGroupSpec"]["template"]}


def main_container(template: dict[str, Any]) -> dict[str, Any]:
    return dict(template["spec"]["containers"][0])


@pytest.mark.parametrize("rdma", [SHARED, RAILS, HOST], ids=["shared", "SR-IOV", "host"])
def test_only_gpu_pods_reach_the_fabric(rdma: dict[str, Any]) -> None:
    made = templates(rdma, networkPolicy=False)
    for name, template in made.items():
        containers = [*template["spec"]["containers"], *template["spec"].get("initContainers", [])]
        pinning = [c["name"] for c in containers if "IPC_LOCK" in str(c["securityContext"])]
        assert pinning == ([MAIN[name]] if name in MAIN else []), "the agents read over TCP"
        if name not in MAIN:
            assert "hostNetwork" not in template["spec"]
            assert NETWORKS not in template["metadata"]["annotations"]
    for pool in GPU_POOLS:
        container = main_container(made[pool])
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
        assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]


@pytest.mark.parametrize("pool", GPU_POOLS)
def test_shared_devices_are_a_resource(pool: str) -> None:
    template = templates(SHARED)[pool]
    resources = main_container(template)["resources"]
    for kind in ("requests", "limits"):
        assert resources[kind]["rdma/hca_shared_devices_a"] == "1"
    assert NETWORKS not in template["metadata"]["annotations"]


@pytest.mark.parametrize("pool", GPU_POOLS)
def test_rails_are_resources_and_attachments(pool: str) -> None:
    template = templates(RAILS)[pool]
    limits = main_container(template)["resources"]["limits"]
    assert {name: limits[name] for name in limits if "rail" in name} == {
        f"nvidia.com/sriov_rail{rail}": "1" for rail in range(8)
    }
    items = template["metadata"]["annotations"][NETWORKS].split(",")
    parsed = [MULTUS_ITEM.fullmatch(item) for item in items]
    assert [match.groups() if match else None for match in parsed] == [
        ("fabric", f"rail-{rail}") for rail in range(8)
    ]


def test_engines_of_a_pool_without_a_job_reach_the_fabric() -> None:
    template = yaml.safe_load(MANIFEST.read_text())["spec"]
    body = template["rollout"]["template"] | {"model": template["model"], "scheduling": {"rdma": RAILS}}
    pool = {"kind": "RolloutPool", "apiVersion": "rl.grpo.dev/v1alpha1", "spec": body}
    pool["metadata"] = {"name": "standing", "namespace": "rl", "uid": "12345678-aaaa"}
    settings = OperatorSettings("trainer:1", "rollout:1")
    cluster = pool_cluster(pool, RolloutPoolSpec.model_validate(body), settings).wire()
    (group,) = cluster["spec"]["workerGroupSpecs"]
    assert group["template"]["metadata"]["annotations"][NETWORKS].count("fabric/rail-") == 8


def test_a_network_may_be_attached_several_times() -> None:
    rdma = {"devices": [{"resource": "openshift.io/mlnx", "count": 2}], "networks": ["ib", "ib"]}
    assert templates(rdma)["trainer"]["metadata"]["annotations"][NETWORKS] == "ib,ib"


def test_annotations_of_the_user_are_added() -> None:
    manifest = yaml.safe_load(MANIFEST.read_text())
    manifest["metadata"] |= {"namespace": "rl", "uid": "12345678-aaaa", "generation": 1}
    manifest["spec"]["scheduling"]["rdma"] = RAILS
    manifest["spec"]["trainer"]["podTemplate"] = {"metadata": {"annotations": {"team": "rl"}}}
    spec = GRPOJobSpec.model_validate(manifest["spec"])
    cluster = job_cluster(manifest, spec, pool_of(spec), OperatorSettings("t:1", "r:1"), False).wire()
    (trainer,) = [g for g in cluster["spec"]["workerGroupSpecs"] if g["groupName"] == "trainer"]
    assert {"team", NETWORKS} <= trainer["template"]["metadata"]["annotations"].keys()


@pytest.mark.parametrize("pool", GPU_POOLS)
def test_pods_on_their_hosts_network_never_meet(pool: str) -> None:
    spec = templates(HOST, networkPolicy=False)[pool]["spec"]
    assert (spec["hostNetwork"], spec["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    terms = spec["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert {t["topologyKey"] for t in terms} == {"kubernetes.io/hostname"}
    apart = {t["labelSelector"]["matchLabels"]["rl.grpo.dev/pool"] for t in terms}
    assert apart == set(GPU_POOLS), "neither beside its own kind nor beside the other pool"
    ports = [p["containerPort"] for c in _all(spec) for p in c.get("ports", [])]
    assert len(ports) == len(set(ports)), "nor do the containers of one pod"


def _all(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [*spec["containers"], *spec.get("initContainers", [])]


def test_the_feasibility_check_knows_the_ports() -> None:
    manifest = yaml.safe_load(MANIFEST.read_text())
    for rdma, alone in ((SHARED, False), (HOST, True)):
        manifest["spec"]["scheduling"] |= {"rdma": rdma, "networkPolicy": False}
        spec = GRPOJobSpec.model_validate(manifest["spec"])
        requests = {request.pool: request.host_network for request in job_requests(spec, pool_of(spec))}
        assert requests == {"head": False, "controller": False, "trainer": alone, "rollout": alone}


@pytest.mark.parametrize("pool", GPU_POOLS)
def test_variables_of_a_job_leave_the_other_defaults_in_place(pool: str) -> None:
    changed = {
        "NCCL_IB_HCA": "=mlx5_0",
        "NCCL_CUMEM_ENABLE": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "8",
        "UCX_NET_DEVICES": "mlx5_0:1",
    }
    env = main_container(templates(SHARED, ncclEnv=changed)[pool])["env"]
    expected = NCCL_DEFAULTS | changed
    found = [(e["name"], e["value"]) for e in env if e["name"] in expected]
    assert dict(found) == expected and len(found) == len(expected), "and each once"


@pytest.mark.parametrize(
    ("rdma", "error"),
    [
        ({"devices": [{"resource": "hca"}]}, r"devices.0.resource\n.*match pattern .*input_value='hca'"),
        ({"devices": [{"resource": "Rdma/hca"}]}, "devices.0.resource"),
        ({"devices": [{"resource": "rdma/hca", "count": 0}]}, "devices.0.count"),
        (SHARED | {"networks": ["fabric/rail.0"]}, "networks.0"),
        (SHARED | {"networks": ["fabric/rails/0"]}, "networks.0"),
        (SHARED | {"networks": ["rail0, rail1"]}, r"networks.0\n.*input_value='rail0, rail1'"),
        (SHARED | {"networks": ["fabric/Rail0"]}, "networks.0"),
        ({}, r"set devices, as in \{resource: rdma/hca_shared_devices_a\}, or hostNetwork"),
        ({"networks": ["rail0"]}, "set devices"),
        (HOST | {"networks": ["rail0"]}, "hostNetwork excludes networks.*hostNetwork: true"),
    ],
)
def test_an_error_names_field_and_value(rdma: dict[str, Any], error: str) -> None:
    with pytest.raises(ValidationError, match=error):
        RdmaSpec.model_validate(rdma)


def test_the_host_network_is_a_choice_against_the_policy() -> None:
    with pytest.raises(ValidationError, match=r"rdma\.hostNetwork needs networkPolicy false"):
        templates(HOST)
