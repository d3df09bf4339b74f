"""The pod that removes the folder of a deleted job has what the job's controller has."""

import json
import shlex
from typing import Any

from grpo_operator.api.v1alpha1.checkpoint import StoreSpec
from grpo_operator.render.pod_security import USER
from grpo_operator.render.ray_cluster import job_cluster
from grpo_operator.render.store_removal import removal_pod
from grpo_operator.settings import OperatorSettings
from support.objects import job, pool_of, spec_of

SETTINGS = OperatorSettings("trainer:2", "rollout:2")
BUCKET = {"uri": "s3://runs/x", "endpoint": "http://s3:9000", "secret": "s3-keys"}


def _pod(store: dict[str, Any], **spec: Any) -> dict[str, Any]:
    manifest = job(checkpoint={"store": store, "deletionPolicy": "Delete"}, **spec)
    return removal_pod(manifest, spec_of(manifest), SETTINGS)


def _container(pod: dict[str, Any]) -> dict[str, Any]:
    (container,) = pod["spec"]["containers"]
    return dict(container)


def _controller(store: dict[str, Any], **spec: Any) -> dict[str, Any]:
    """Return the PodSpec of the job's controller."""
    manifest = job(checkpoint={"store": store}, **spec)
    parsed = spec_of(manifest)
    cluster = job_cluster(manifest, parsed, pool_of(parsed), SETTINGS, False).wire()
    return dict(cluster["spec"]["workerGroupSpecs"][0]["template"]["spec"])


def test_it_is_told_the_folder_of_the_job_and_its_store() -> None:
    pod = _pod(BUCKET)
    meta = pod["metadata"]
    assert meta["name"] == "tiny-moe-12345678-store-removal" and meta["namespace"] == "default"
    assert meta["labels"] == {"rl.grpo.dev/job": "tiny-moe", "rl.grpo.dev/pool": "store-removal"}
    (command,) = _container(pod)["args"]
    words = shlex.split(command.partition("-m ")[2])
    assert words[:2] == ["grpo_worker.checkpointing.removal", "/store/default-tiny-moe-12345678"]
    assert StoreSpec.model_validate(json.loads(words[2])) == StoreSpec(**BUCKET)
    assert pod["spec"]["restartPolicy"] == "OnFailure", "kubelet tries again with a back-off"


def test_the_garbage_collector_deletes_it_after_the_job_only() -> None:
    (reference,) = _pod(BUCKET)["metadata"]["ownerReferences"]
    assert reference["uid"] == job()["metadata"]["uid"] and "blockOwnerDeletion" not in reference


def test_it_has_store_credentials_and_user_of_the_controller() -> None:
    for store in ({"pvc": "checkpoints"}, {"path": "/mnt/store"}, BUCKET):
        pod, controller = _pod(store)["spec"], _controller(store)
        for key in ("securityContext", "tolerations", "affinity"):
            assert pod.get(key) == controller.get(key)
        (volume,) = [v for v in pod["volumes"] if v["name"] == "store"]
        assert volume in controller["volumes"]
        mounts = {m["mountPath"]: m for m in _container({"spec": pod})["volumeMounts"]}
        assert mounts["/store"] == {"name": "store", "mountPath": "/store"}
    secrets = [e["valueFrom"]["secretKeyRef"] for e in _container(_pod(BUCKET))["env"] if "AWS" in e["name"]]
    assert {secret["name"] for secret in secrets} == {"s3-keys"} and len(secrets) == 3


def test_no_key_token_or_server_is_in_it() -> None:
    pod = _pod({"pvc": "checkpoints"}, scheduling={"tls": {}})
    assert pod["spec"]["automountServiceAccountToken"] is False
    assert {v["name"] for v in pod["spec"]["volumes"]} == {"store", "tmp-controller"}
    assert "rl.grpo.dev/tls" not in pod["metadata"]["labels"]
    assert not {"ports", "livenessProbe", "readinessProbe"}.intersection(_container(pod))


def test_only_where_the_stores_own_folder_is_roots_it_is_root() -> None:
    plain = _container(_pod({"pvc": "checkpoints"}))["securityContext"]
    assert plain["capabilities"] == {"drop": ["ALL"]} and "runAsUser" not in plain
    root = _container(_pod({"path": "/mnt/store"}))["securityContext"]
    assert root["runAsUser"] == 0 and root["capabilities"]["drop"] == ["ALL"]
    assert root["readOnlyRootFilesystem"] and not root["allowPrivilegeEscalation"]
    own = _pod({"path": "/mnt/store"}, scheduling={"securityContext": {"runAsUser": 1000}})
    assert "runAsUser" not in _container(own)["securityContext"]
    assert own["spec"]["securityContext"]["runAsUser"] == 1000 != USER


def test_what_the_pod_template_of_the_controller_adds_is_there_too() -> None:
    template = {
        "metadata": {"annotations": {"team": "rl"}, "labels": {"cost": "a"}},
        "spec": {
            "serviceAccountName": "bucket",
            "volumes": [{"name": "ca", "configMap": {"name": "ca"}}],
            "initContainers": [{"name": "prepare-store", "resources": {}}, {"name": "x", "image": "y"}],
            "containers": [
                {
                    "name": "controller",
                    "env": [{"name": "AWS_CA_BUNDLE", "value": "/ca/ca.crt"}],
                    "volumeMounts": [{"name": "ca", "mountPath": "/ca"}],
                    "resources": {"requests": {"memory": "64Gi"}},
                    "lifecycle": {"preStop": {"sleep": {"seconds": 1}}},
                },
                {"name": "log-shipper", "image": "ships:1"},
            ],
        },
    }
    pod = _pod(BUCKET, controller={"podTemplate": template})
    container = _container(pod)
    assert pod["metadata"]["annotations"] == {"team": "rl"} and pod["metadata"]["labels"]["cost"] == "a"
    assert pod["spec"]["serviceAccountName"] == "bucket" and "initContainers" not in pod["spec"]
    assert {"name": "ca", "mountPath": "/ca"} in container["volumeMounts"]
    assert {"name": "AWS_CA_BUNDLE", "value": "/ca/ca.crt"} in container["env"]
    assert container["resources"]["requests"]["memory"] == "512Mi" and "lifecycle" not in container


def test_its_image_is_that_of_the_operator_unless_the_job_names_one() -> None:
    assert _container(_pod(BUCKET))["image"] == "trainer:2"
    assert _container(_pod(BUCKET, image="own:1"))["image"] == "own:1"
