"""The API server's admission of pods where the Pod Security Standard restricted is enforced."""

import copy
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from grpo_devcluster import processes
from grpo_devcluster.addons import start_kuberay
from grpo_devcluster.fakenodes import volume
from grpo_devcluster.paths import REPO
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.rolloutpool import RolloutPoolSpec
from grpo_operator.render.ray_cluster import job_cluster, pool_cluster
from grpo_operator.settings import OperatorSettings
from support.api_server import Api, until

NAMESPACE = "restricted"
LEVEL = "pod-security.kubernetes.io/enforce=restricted"
SETTINGS = OperatorSettings("trainer:1", "rollout:1")
MANIFESTS = sorted(REPO.glob("manifests/**/*.yaml"))


@pytest.fixture(scope="module", autouse=True)
def namespace(api: Api) -> Iterator[None]:
    claims = [*volume("grpo-checkpoints", NAMESPACE)]
    api.ok("create", "namespace", NAMESPACE)
    api.ok("label", "namespace", NAMESPACE, LEVEL)
    api.ok("apply", "-f", "-", stdin=yaml.safe_dump_all(claims))
    yield
    api.ok("delete", "-f", "-", "--wait=false", stdin=yaml.safe_dump_all(claims))
    api.ok("delete", "namespace", NAMESPACE, "--wait=false")


@pytest.fixture
def injecting_kuberay() -> Iterator[None]:
    """KubeRay with its default of an init container in each worker."""
    processes.stop("kuberay-operator")
    start_kuberay(init_containers=True)
    yield
    processes.stop("kuberay-operator")
    start_kuberay()


def _refusals(api: Api, cluster: dict[str, Any]) -> set[str]:
    """Ask the API server for every pod of a RayCluster; return what it refuses."""
    groups = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
    found: set[str] = set()
    for index, group in enumerate(groups):
        pod = copy.deepcopy(group["template"]) | {"apiVersion": "v1", "kind": "Pod"}
        pod["metadata"] |= {"name": f"pod-{index}", "namespace": NAMESPACE}
        done = api.run("create", "--dry-run=server", "-f", "-", stdin=json.dumps(pod))
        if done.returncode:
            assert 'violates PodSecurity "restricted:latest": ' in done.stderr, done.stderr
            found |= _reasons(done.stderr.split('latest": ')[1])
    return found


def _reasons(message: str) -> set[str]:
    """Return what a refusal names, without values and explanations: ``runAsUser=0 (pod must ...), ...``."""
    brief = re.sub(r"\([^()]*(\([^()]*\)[^()]*)*\)", "", message)
    return {re.split(" !=|=", reason)[0].strip() for reason in brief.split(", ")}


def _cluster(manifest: dict[str, Any], **scheduling: Any) -> dict[str, Any]:
    spec = manifest["spec"]
    absent = ("rdma", "runtimeClassName")  # a case of its own; a class that this API server lacks
    spec["scheduling"] = {k: v for k, v in spec.get("scheduling", {}).items() if k not in absent} | scheduling
    if manifest["kind"] == "RolloutPool":
        return pool_cluster(_owner(manifest), RolloutPoolSpec.model_validate(spec), SETTINGS).wire()
    parsed = GRPOJobSpec.model_validate(spec)
    return job_cluster(_owner(manifest), parsed, parsed.rollout.template, SETTINGS, False).wire()


def _owner(manifest: dict[str, Any]) -> dict[str, Any]:
    return manifest | {"metadata": manifest["metadata"] | {"namespace": NAMESPACE, "uid": "12345678-aaaa"}}


SOCKETS = {"restricted volume types", "runAsNonRoot", "runAsUser"}


@pytest.mark.parametrize("file", MANIFESTS, ids=lambda file: file.stem)
def test_pods_of_every_manifest_are_admitted_but_for_declared_exceptions(api: Api, file: Any) -> None:
    for manifest in yaml.safe_load_all(file.read_text()):
        if manifest["kind"] == "GRPOJob":
            manifest["spec"]["checkpoint"]["store"] = {"pvc": "grpo-checkpoints"}
            for volume_of in (manifest["spec"]["model"], manifest["spec"]["data"]):
                given = volume_of.get("volume", {})
                if given.pop("path", None):
                    given["pvc"] = "grpo-checkpoints"
        if manifest["kind"] in ("GRPOJob", "RolloutPool"):
            transport = manifest["spec"].get("weightSync", {}).get("transport")
            assert _refusals(api, _cluster(manifest)) == (SOCKETS if transport == "cuda-ipc" else set())


RDMA = {"devices": [{"resource": "rdma/hca"}]}


@pytest.mark.parametrize(
    ("store", "scheduling", "refused"),
    [
        ({"pvc": "grpo-checkpoints"}, {"rdma": RDMA, "securityContext": {"runAsUser": 1000}}, set()),
        (
            {"pvc": "grpo-checkpoints"},
            {"rdma": RDMA},
            {"unrestricted capabilities", "runAsNonRoot", "runAsUser"},
        ),
        (
            {"pvc": "grpo-checkpoints"},
            {"rdma": {"hostNetwork": True}, "networkPolicy": False, "securityContext": {"runAsUser": 1000}},
            {"host namespaces", "hostPort"},
        ),
        ({"path": "/mnt"}, {"securityContext": {"runAsUser": 1000}}, {"restricted volume types"}),
        (
            {"path": "/mnt"},
            {},
            {"restricted volume types", "unrestricted capabilities", "runAsNonRoot", "runAsUser"},
        ),
        ({"pvc": "grpo-checkpoints"}, {"securityContext": {"runAsUser": 0}}, {"runAsNonRoot", "runAsUser"}),
    ],
    ids=["rdma of a prepared node", "rdma", "host network", "path as a user", "path", "root"],
)
def test_declared_exceptions_are_all_that_the_standard_refuses(
    api: Api, store: dict[str, Any], scheduling: dict[str, Any], refused: set[str]
) -> None:
    manifest = yaml.safe_load((REPO / "manifests" / "qwen3-30b-a3b-16xh100.yaml").read_text())
    manifest["spec"]["checkpoint"]["store"] = store
    manifest["spec"]["model"].pop("volume", None)
    assert _refusals(api, _cluster(manifest, **scheduling)) == refused


def test_kuberays_own_containers_are_admitted_too(
    api: Api, tiny: dict[str, Any], fake_nodes: Any, injecting_kuberay: None
) -> None:
    fake_nodes(2)
    tiny["metadata"]["namespace"] = NAMESPACE
    tiny["spec"]["checkpoint"]["store"] = {"pvc": "grpo-checkpoints"}
    assert api.apply(tiny).returncode == 0
    pods = until("all pods run", lambda: _running(api, 6), 90)
    workers = [pod for pod in pods if pod["metadata"]["labels"]["ray.io/node-type"] == "worker"]
    assert len(workers) == 5
    for pod in workers:
        assert "wait-gcs-ready" in [c["name"] for c in pod["spec"]["initContainers"]], "KubeRay's own"
    api.ok("delete", "grpojob", "tiny-moe", "-n", NAMESPACE, "--cascade=foreground", "--timeout=60s")


def _running(api: Api, count: int) -> list[dict[str, Any]]:
    pods = api.get("pods", "-n", NAMESPACE)["items"]
    running = [pod for pod in pods if pod["status"].get("phase") == "Running"]
    return running if len(running) == count else []


def test_a_job_whose_pods_are_refused_says_so(api: Api, tiny: dict[str, Any], fake_nodes: Any) -> None:
    fake_nodes(2)
    tiny["metadata"]["namespace"] = NAMESPACE
    assert api.apply(tiny).returncode == 0, "its store is a directory of the nodes"

    def degraded() -> dict[str, Any]:
        status = api.get("grpojob", "tiny-moe", "-n", NAMESPACE).get("status") or {}
        found = (c for c in status.get("conditions", []) if c["reason"] == "PodsRefused")
        return next(found, {})

    condition = until("the condition", degraded, 60)
    assert (condition["type"], condition["status"]) == ("Degraded", "True")
    assert "a pod is forbidden: violates PodSecurity" in condition["message"]
    assert "hostPath" in condition["message"]
    api.ok("delete", "grpojob", "tiny-moe", "-n", NAMESPACE, "--cascade=foreground", "--timeout=60s")
