"""ValidatingAdmissionPolicies of the chart and the samples: what the API server accepts and refuses."""

import copy
import json
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_devcluster.gobuild import binary
from grpo_devcluster.install import CHART
from grpo_devcluster.paths import REPO
from grpo_operator.api.keys import secret_data
from grpo_operator.api.names import api_secret, key_secret, tls_secret
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.tls import TlsSpec
from grpo_operator.render.metadata import metadata
from grpo_operator.render.ray_cluster import job_cluster
from grpo_operator.render.store_removal import removal_pod
from grpo_operator.render.tls import tls_secret as tls_content
from grpo_operator.settings import OperatorSettings
from support.api_server import Api, until
from support.objects import pool_of

SYSTEM = "grpo-system"
OPERATOR = f"--as=system:serviceaccount:{SYSTEM}:ops"
TINY = yaml.safe_load((REPO / "manifests" / "tiny-moe.yaml").read_text())
KINDS = ("ClusterRole", "ClusterRoleBinding", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
SAMPLES = REPO / "manifests" / "policies"
OWNERS = [{"apiVersion": TINY["apiVersion"], "kind": "GRPOJob", "name": "tiny", "uid": "12345678-90ab"}]


@pytest.fixture(scope="module", autouse=True)
def operator() -> None:
    """The test itself is the operator."""


@pytest.fixture(scope="module", autouse=True)
def namespace(api: Api) -> None:
    api.run("create", "namespace", SYSTEM)


def _chart(*settings: str) -> str:
    command = [str(binary("helm")), "template", "ops", str(CHART), "-n", SYSTEM]
    command += [argument for setting in settings for argument in ("--set-json", setting)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return yaml.safe_dump_all(d for d in yaml.safe_load_all(done.stdout) if d and d["kind"] in KINDS)


@pytest.fixture(scope="module")
def chart(api: Api) -> Iterator[None]:
    """The chart's rights and policies."""
    objects = _chart("allNamespaces=true", "admissionPolicies.podTemplates.enabled=true")
    api.ok("apply", "-f", "-", stdin=objects)
    secret = _secret("other")
    until("the policies work", lambda: _refused(api, secret, OPERATOR), 60)
    until("each of them", lambda: _refused(api, _cluster(hostPID=True), OPERATOR), 60)
    until("each of them", lambda: _refused(api, _templated({"hostPID": True})), 60)
    until("each of them", lambda: _refused(api, _config_map({}), OPERATOR), 60)
    yield
    api.ok("delete", "-f", "-", stdin=objects)


def _refused(api: Api, manifest: dict[str, Any], *arguments: str, verb: str = "create") -> str:
    """Return why a policy refuses the creation of an object; "" if it is accepted."""
    done = api.run(verb, "--dry-run=server", "-f", "-", *arguments, stdin=json.dumps(manifest))
    if done.returncode == 0:
        return ""
    assert "ValidatingAdmissionPolicy" in done.stderr, done.stderr
    return done.stderr


def _job(**spec: Any) -> dict[str, Any]:
    meta = {"name": "tiny", "namespace": "default", "uid": "12345678-90ab"}
    return {**copy.deepcopy(TINY), "metadata": meta, "spec": copy.deepcopy(TINY["spec"]) | spec}


def _user_job(**spec: Any) -> dict[str, Any]:
    return _job(**spec) | {"metadata": {"name": "tiny", "namespace": "default"}}


def _templated(spec: dict[str, Any]) -> dict[str, Any]:
    job = _user_job()
    job["spec"]["trainer"]["podTemplate"] = {"spec": spec}
    return job


def _secret(name: str, **changes: Any) -> dict[str, Any]:
    labels = {"app.kubernetes.io/managed-by": "grpo-operator"}
    meta = {"name": name, "namespace": "default", "labels": labels}
    return {"apiVersion": "v1", "kind": "Secret", "type": "Opaque", "metadata": meta} | changes


def _config_map(labels: dict[str, str], name: str = "anything", namespace: str = "default") -> dict[str, Any]:
    meta = {"name": name, "namespace": namespace, "labels": labels, "ownerReferences": OWNERS}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta}


def _cluster(
    store: dict[str, Any] | None = None, scheduling: dict[str, Any] | None = None, **pod: Any
) -> dict[str, Any]:
    """Return the RayCluster of a job, with fields of the training pods changed."""
    job = _job(checkpoint={"store": store or {"pvc": "store"}}, scheduling=scheduling or {})
    spec = GRPOJobSpec.model_validate(job["spec"])
    cluster = job_cluster(job, spec, pool_of(spec), OperatorSettings("t:a", "r:a"), False).wire()
    cluster["spec"]["workerGroupSpecs"][1]["template"]["spec"] |= pod
    return cluster


@pytest.mark.usefixtures("chart")
def test_the_operator_creates_secrets_with_keys_of_pods_only(api: Api) -> None:
    job = _job()
    meta = metadata(job, key_secret(job), {"app.kubernetes.io/managed-by": "grpo-operator"})
    data = dict.fromkeys(secret_data("m", job, "shared"), "eA==")
    own = _secret("x", metadata=meta, data=data, immutable=True)
    api.ok("delete", "secret", "grpo-agents", "grpo-agents-epoch", "--ignore-not-found")  # of other modules
    entries = dict.fromkeys(tls_content("m", job, TlsSpec(), None), "eA==")
    of_tls = {**own, "metadata": meta | {"name": tls_secret(job)}, "data": entries}
    of_users = {**own, "metadata": meta | {"name": api_secret(job)}, "data": {"api-key": "eA=="}}
    epoch = _secret("grpo-agents-epoch", data={"epoch": "eA=="})
    for accepted in (own, of_tls, of_users, _secret("grpo-agents"), epoch):
        assert not _refused(api, accepted, OPERATOR)
    account = {"kubernetes.io/service-account.name": "default"}
    token = _secret("grpo-agents", type="kubernetes.io/service-account-token")
    token["metadata"]["annotations"] = account
    assert "of type Opaque only" in _refused(api, token, OPERATOR)
    assert not _refused(api, token), "others may"
    foreign = {**own, "metadata": meta | {"name": "database-12345678-key"}}
    without = {**own, "metadata": meta | {"ownerReferences": []}}
    for name, secret in {"foreign": foreign, "without": without, "other": _secret("database")}.items():
        assert "with the key of a job or pool only" in _refused(api, secret, OPERATOR), name
    unlabelled = _secret("grpo-agents")
    del unlabelled["metadata"]["labels"]
    assert "managed-by=grpo-operator only" in _refused(api, unlabelled, OPERATOR)
    assert "tls.key, generate and api-key only" in _refused(
        api, {**own, "data": {"password": "eA=="}}, OPERATOR
    )


@pytest.mark.usefixtures("chart")
def test_the_operator_writes_children_of_jobs_only(api: Api) -> None:
    assert not _refused(api, _config_map({"rl.grpo.dev/job": "tiny"}), OPERATOR)
    assert not _refused(api, _config_map({}, "grpo-gpu-health", SYSTEM), OPERATOR, "-n", SYSTEM)
    for foreign in (_config_map({}), _config_map({}, "grpo-gpu-health"), _config_map({}, "x", "kube-system")):
        assert "objects of a GRPOJob or RolloutPool only" in _refused(
            api, foreign, OPERATOR, "-n", foreign["metadata"]["namespace"]
        )
    api.ok("create", "configmap", "of-a-user", "--from-literal=a=b")
    seized = _config_map({"rl.grpo.dev/job": "tiny"}, "of-a-user")
    message = _refused(api, seized, OPERATOR, "--server-side", "--force-conflicts", verb="apply")
    assert "changes and deletes objects of a GRPOJob or RolloutPool only" in message
    api.ok("delete", "configmap", "of-a-user")
    api.ok("run", "of-a-user", "--image=x:y", "--restart=Never")
    done = api.run("delete", "pod", "of-a-user", "--dry-run=server", OPERATOR)
    assert "changes and deletes objects of a GRPOJob" in done.stderr
    api.ok("label", "pod", "of-a-user", "rl.grpo.dev/job=tiny")
    api.ok("delete", "pod", "of-a-user", "--dry-run=server", OPERATOR)
    api.ok("delete", "pod", "of-a-user", "--force")


@pytest.mark.usefixtures("chart")
def test_the_operator_changes_no_spec_of_a_job(api: Api) -> None:
    assert api.apply(_user_job()).returncode == 0

    def patch(change: dict[str, Any]) -> str:
        given = ("--type=merge", "-p", json.dumps(change), "--dry-run=server", OPERATOR)
        return api.run("patch", "grpojob", "tiny", *given).stderr

    assert patch({"metadata": {"annotations": {"rl.grpo.dev/profile-accepted": "x"}}}) == ""
    assert patch({"metadata": {"finalizers": ["rl.grpo.dev/store"]}}) == ""
    assert "changes no spec of a GRPOJob" in patch({"spec": {"image": "evil:1"}})
    api.ok("delete", "grpojob", "tiny")
    pool = {
        "apiVersion": TINY["apiVersion"],
        "kind": "RolloutPool",
        "spec": TINY["spec"]["rollout"]["template"],
    }
    pool["spec"] = pool["spec"] | {"model": TINY["spec"]["model"]}
    labels = {"labels": {"rl.grpo.dev/job": "tiny"}}
    alone = pool | {"metadata": {"name": "tiny-rollout"} | labels}
    assert "with a GRPOJob as their only owner" in _refused(api, alone, OPERATOR)
    owned = pool | {"metadata": alone["metadata"] | {"ownerReferences": OWNERS}}
    assert not _refused(api, owned, OPERATOR)
    assert "RolloutPools of jobs only" in _refused(api, pool | {"metadata": {"name": "own"}}, OPERATOR)


@pytest.mark.usefixtures("chart")
def test_what_the_operator_creates_has_an_owner(api: Api) -> None:
    why = "with a GRPOJob or RolloutPool as their only owner"
    for made in (_cluster(), _remover({"pvc": "store"}), _config_map({"rl.grpo.dev/job": "tiny"})):
        assert not _refused(api, made, OPERATOR)
        foreign = [{"apiVersion": "v1", "kind": "ConfigMap", "name": "x", "uid": "1"}]
        for owners in ([], foreign, [*OWNERS, *foreign]):
            changed = made | {"metadata": made["metadata"] | {"ownerReferences": owners}}
            assert why in _refused(api, changed, OPERATOR)
            assert not _refused(api, changed), "others may"
    kai = _cluster(scheduling={"gangScheduler": "kai"})
    assert "ownerReferences" not in kai["metadata"] and not _refused(api, kai, OPERATOR)
    del kai["metadata"]["annotations"]
    assert why in _refused(api, kai, OPERATOR)


def _container(cluster: dict[str, Any], **context: Any) -> dict[str, Any]:
    container = cluster["spec"]["workerGroupSpecs"][1]["template"]["spec"]["containers"][0]
    container["securityContext"] |= context
    return cluster


TOKEN = [{"name": "t", "projected": {"sources": [{"serviceAccountToken": {"path": "token"}}]}}]
KEYS = [{"name": "k", "secret": {"secretName": "grpo-agents"}}]
TAKEN = {
    "is privileged": _container(_cluster(), privileged=True, allowPrivilegeEscalation=True),
    "adds capabilities": _container(_cluster(), capabilities={"add": ["SYS_ADMIN"]}),
    "processes or IPC of its node": _cluster(hostIPC=True),
    "the network of its node": _cluster(hostNetwork=True),
    "a path of its node": _cluster({"path": "/mnt/store"}),
    "a token of a ServiceAccount": _cluster(automountServiceAccountToken=True),
    "mounts a token": _cluster(volumes=TOKEN),
    "the master key": _cluster(volumes=KEYS),
}


@pytest.mark.usefixtures("chart")
def test_ray_clusters_take_nothing_of_their_nodes(api: Api) -> None:
    assert not _refused(api, _cluster(), OPERATOR)
    assert not _refused(api, _container(_cluster(), capabilities={"add": ["IPC_LOCK"]}), OPERATOR)
    for why, cluster in TAKEN.items():
        assert why in _refused(api, cluster, OPERATOR)
    unlabelled = _cluster()
    unlabelled["metadata"]["labels"] = {}
    assert "objects of a GRPOJob or RolloutPool only" in _refused(api, unlabelled, OPERATOR)


def _remover(store: dict[str, Any], **pod: Any) -> dict[str, Any]:
    """Return the pod that removes the folder of a deleted job, with changed fields."""
    job = _job(checkpoint={"store": store})
    made = removal_pod(job, GRPOJobSpec.model_validate(job["spec"]), OperatorSettings("t:a", "r:a"))
    return made | {"spec": made["spec"] | pod}


@pytest.mark.usefixtures("chart")
def test_pods_that_the_operator_creates_take_nothing_of_their_nodes_either(api: Api) -> None:
    own = _remover({"pvc": "store"})
    assert not _refused(api, own, OPERATOR)
    assert "a path of its node" in _refused(api, _remover({"path": "/mnt/store"}), OPERATOR)
    assert "the network of its node" in _refused(api, _remover({"pvc": "store"}, hostNetwork=True), OPERATOR)
    with_token = _remover({"pvc": "store"}, volumes=[*own["spec"]["volumes"], *TOKEN])
    assert "mounts a token" in _refused(api, with_token, OPERATOR)
    foreign = {**own, "metadata": {"name": "x", "namespace": "default"}}
    assert "objects of a GRPOJob or RolloutPool only" in _refused(api, foreign, OPERATOR)


def _accepted(api: Api, cluster: dict[str, Any]) -> bool:
    return not _refused(api, cluster, OPERATOR)


@pytest.mark.usefixtures("chart")
def test_a_label_of_the_namespace_allows_a_feature(api: Api) -> None:
    features = {
        "privileged": "is privileged", "hostPID": "processes or IPC of its node",
        "hostNetwork": "the network of its node", "hostPath": "a path of its node",
        "serviceAccount": "a token of a ServiceAccount", "masterKey": "the master key",
    }  # fmt: skip
    for feature, why in features.items():
        label = f"rl.grpo.dev/allow-{feature}"
        api.ok("label", "namespace", "default", f"{label}=true")
        accepted = partial(_accepted, api, TAKEN[why])
        until(f"{feature} is allowed", accepted, 30)
        api.ok("label", "namespace", "default", f"{label}-")
    until("no more", lambda: _refused(api, TAKEN["the master key"], OPERATOR), 30)


@pytest.mark.usefixtures("chart")
def test_pod_templates_set_what_the_chart_allows(api: Api) -> None:
    containers = [{"name": "ray-worker", "env": [{"name": "A", "value": "b"}]}]
    assert not _refused(api, _templated({"nodeSelector": {"a": "b"}, "containers": containers}))
    for spec in (
        {"hostNetwork": True},
        {"serviceAccountName": "admin"},
        {"securityContext": {"runAsUser": 0}},
    ):
        assert "podTemplate.spec may set affinity, containers" in _refused(api, _templated(spec))
    for secret in ("grpo-agents", "grpo-agents-epoch", "victim-12345678-key", "victim-12345678-tls"):
        plain = {"secret": {"secretName": secret}}
        projected = {"projected": {"sources": [{"secret": {"name": secret}}]}}
        for volume in (plain, projected):
            job = _templated({"volumes": [{"name": "k"} | volume]})
            assert "may not contain keys of pods" in _refused(api, job)
    assert not _refused(api, _templated({"volumes": [{"name": "k", "secret": {"secretName": "own"}}]}))
    pool = {"apiVersion": TINY["apiVersion"], "kind": "RolloutPool", "metadata": {"name": "own"}}
    engines = TINY["spec"]["rollout"]["template"] | {"model": TINY["spec"]["model"]}
    assert not _refused(api, pool | {"spec": engines})
    assert "podTemplate.spec may set" in _refused(
        api, pool | {"spec": engines | {"podTemplate": {"spec": {"hostPID": True}}}}
    )


@pytest.fixture
def sample(api: Api, request: pytest.FixtureRequest) -> Iterator[Path]:
    file = SAMPLES / f"{request.param}.yaml"
    api.ok("apply", "-f", str(file))
    yield file
    api.ok("delete", "-f", str(file))


@pytest.mark.parametrize("sample", ["own-registry"], indirect=True)
def test_a_sample_admits_images_of_one_registry_only(api: Api, sample: Path) -> None:
    why = "images of jobs must be of registry.example.com"
    until("it works", lambda: why in _refused(api, _cluster()), 60)
    text = json.dumps(_cluster())
    own = json.loads(
        text.replace('"t:a"', '"registry.example.com/t:a"').replace('"r:a"', '"registry.example.com/r:a"')
    )
    assert not _refused(api, own)
    assert why in _refused(api, _remover({"pvc": "store"}))
    foreign = copy.deepcopy(own)
    foreign["metadata"]["labels"] = {}
    foreign["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["image"] = "docker.io/x"
    assert not _refused(api, foreign), "RayClusters of others are not its business"
    foreign["metadata"]["labels"] = own["metadata"]["labels"]
    assert why in _refused(api, foreign)


@pytest.mark.parametrize("sample", ["no-host-network"], indirect=True)
def test_a_sample_switches_the_hosts_network_off_but_for_some_namespaces(api: Api, sample: Path) -> None:
    job = yaml.safe_load((REPO / "manifests" / "qwen3-8b-8gpu.yaml").read_text())

    def with_host_network(wanted: bool) -> dict[str, Any]:
        rdma = {"devices": [{"resource": "rdma/hca"}], "hostNetwork": wanted}
        spec = job["spec"] | {"scheduling": {"rdma": rdma, "networkPolicy": False}}
        return {**job, "spec": spec}

    asks = with_host_network(True)
    until("it works", lambda: "hostNetwork is not allowed in this namespace" in _refused(api, asks), 60)
    assert not _refused(api, job) and not _refused(api, with_host_network(False))
    api.ok("label", "namespace", "default", "rdma=true")
    until("the label allows it", lambda: not _refused(api, asks), 30)
    api.ok("label", "namespace", "default", "rdma-")


@pytest.mark.parametrize("sample", ["no-colocated-mode"], indirect=True)
def test_a_sample_switches_colocated_jobs_off(api: Api, sample: Path) -> None:
    until("it works", lambda: "colocated is switched off" in _refused(api, _user_job(mode="colocated")), 60)
    assert not _refused(api, _user_job()) and not _refused(api, _user_job(mode="static"))


def test_every_sample_is_tested() -> None:
    tested = Path(__file__).read_text()
    assert all(f'["{file.stem}"]' in tested for file in SAMPLES.glob("*.yaml"))


def test_policies_can_be_switched_off() -> None:
    off = _chart("admissionPolicies.operator=false", "admissionPolicies.pods.enabled=false")
    assert "ValidatingAdmissionPolicy" not in off
