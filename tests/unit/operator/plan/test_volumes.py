"""Mounts of model.volume and data.volume, and fetching from a URI."""

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from grpo_operator.api.base import AGENT_RESOURCES
from grpo_operator.api.v1alpha1.rolloutpool import RolloutPoolSpec
from grpo_operator.api.v1alpha1.volumes import FETCHED_FILES, VolumeSpec
from grpo_operator.plan.capacity.feasibility import quantity
from grpo_operator.plan.planner.pool_checks import check_pool, check_reference
from grpo_operator.plan.planner.resolve import RefusedError
from grpo_operator.render.ray_cluster import job_cluster, pool_cluster
from grpo_operator.settings import OperatorSettings
from support.objects import job, pool_of, spec_of

SETTINGS = OperatorSettings("trainer:1", "rollout:1")
FOLDER = "/store/default-tiny-moe-12345678"
URI: dict[str, Any] = {"mountPath": "/models", "uri": "hf://org/model"}


def rendered(
    model: dict[str, Any] | None, data: dict[str, Any] | None = None, **more: Any
) -> dict[str, dict[str, Any]]:
    """Return the PodSpecs of a job by pool."""
    manifest = job(**more)
    if model:
        manifest["spec"]["model"] = {"path": "/models/tiny", "volume": model}
    if data:
        manifest["spec"]["data"] |= {"train": "/data/a.jsonl", "volume": data}
        manifest["spec"]["reward"] = {"builtin": "math"}
    spec = spec_of(manifest)
    made = job_cluster(manifest, spec, pool_of(spec), SETTINGS, False).wire()["spec"]
    groups = {group["groupName"]: group["template"]["spec"] for group in made["workerGroupSpecs"]}
    return groups | {"head": made["headGroupSpec"]["template"]["spec"]}


def mounts(pod: dict[str, Any], path: str) -> dict[str, dict[str, Any]]:
    """Return what each container mounts at a path."""
    containers = [*pod["containers"], *pod.get("initContainers", [])]
    return {c["name"]: m for c in containers for m in c["volumeMounts"] if m["mountPath"] == path}


def volume(pod: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [volume for volume in pod["volumes"] if volume["name"] == name]
    return dict(found)


READERS = {"controller": {"controller"}, "trainer": {"ray-worker"}, "rollout": {"engine"}, "head": set[str]()}


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ({"pvc": "models"}, {"persistentVolumeClaim": {"claimName": "models", "readOnly": True}}),
        ({"path": "/mnt/models"}, {"hostPath": {"path": "/mnt/models"}}),
    ],
)
def test_the_model_is_mounted_read_only_where_it_is_read(
    source: dict[str, Any], wanted: dict[str, Any]
) -> None:
    pods = rendered({"mountPath": "/models"} | source)
    for pool, readers in READERS.items():
        found = mounts(pods[pool], "/models")
        assert set(found) == readers
        for mount in found.values():
            assert mount == {"name": "model-files", "mountPath": "/models", "readOnly": True}
            assert volume(pods[pool], "model-files") == {"name": "model-files"} | wanted
    for pool in ("controller", "rollout"):
        assert [c["name"] for c in pods[pool]["initContainers"]] == ["prepare-store"]
    assert [c["name"] for c in pods["trainer"]["initContainers"]] == ["prepare-store", "agent"]


def test_only_the_controller_mounts_data() -> None:
    pods = rendered(None, {"mountPath": "/data", "pvc": "datasets"})
    assert set(mounts(pods["controller"], "/data")) == {"controller"}
    assert volume(pods["controller"], "data-files")["persistentVolumeClaim"]["claimName"] == "datasets"
    for pool in ("trainer", "rollout", "head"):
        assert not mounts(pods[pool], "/data") and "data-files" not in str(pods[pool])


@pytest.mark.parametrize("store", ["models", "checkpoints"])
def test_a_claim_is_one_volume_of_a_pod(store: str) -> None:
    """Kubelet may never mount the second of two volumes of one claim."""
    checkpoint = job()["spec"]["checkpoint"] | {"store": {"pvc": store}}
    claim = {"pvc": "models"}
    pods = rendered({"mountPath": "/models"} | claim, {"mountPath": "/data"} | claim, checkpoint=checkpoint)
    for pool, readers in READERS.items():
        found = [v.get("persistentVolumeClaim", {}).get("claimName") for v in pods[pool].get("volumes", [])]
        claims = [name for name in found if name]
        assert len(claims) == len(set(claims)) and ("models" in claims) == bool(readers)
        for mount in mounts(pods[pool], "/models").values():
            assert mount["name"] == ("store" if store == "models" else "model-files")
            assert mount["readOnly"] is True
    data = mounts(pods["controller"], "/data")["controller"]
    assert data == mounts(pods["controller"], "/models")["controller"] | {"mountPath": "/data"}
    source = volume(pods["trainer"], "store")["persistentVolumeClaim"]
    assert source == {"claimName": store}, "the store is written to"
    assert "readOnly" not in mounts(pods["trainer"], FOLDER)["ray-worker"]


def test_fetched_files_are_mounted_from_the_store_when_complete() -> None:
    pods = rendered(URI)
    for pool, readers in READERS.items():
        found = mounts(pods[pool], "/models")
        assert set(found) == readers
        for mount in found.values():
            assert mount["name"] == "store" and mount["readOnly"] is True
            directory, _, last = mount["subPath"].rpartition("/")
            assert directory.startswith("volumes/") and last == FETCHED_FILES
    names = [c["name"] for c in pods["trainer"]["initContainers"]]
    assert names == ["prepare-store", "wait-for-model", "agent"]
    for pool in ("trainer", "rollout"):
        wait = pods[pool]["initContainers"][1]
        assert f"until [ -f /store/{directory}/COMPLETE ]; do" in wait["args"][0]
        assert mounts(pods[pool], "/store/volumes")["wait-for-model"]["readOnly"] is True
        limit = quantity(wait["resources"]["requests"]["memory"])
        assert limit < quantity(AGENT_RESOURCES.requests()["memory"]), (
            "pods that wait ask for no more than those that run"
        )


def test_a_waiting_pod_ends_on_sigterm() -> None:
    """PID 1 of a container ignores signals for which it has no handler."""
    wait = rendered(URI)["trainer"]["initContainers"][1]
    process = subprocess.Popen([*wait["command"], *wait["args"]], start_new_session=True)
    try:
        while not Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text():
            time.sleep(0.01)
        process.terminate()
        assert process.wait(1.5) == 0, "before its sleep of 2 seconds ends"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_only_the_controllers_init_container_has_the_credential() -> None:
    model = URI | {"credential": {"secret": "hub", "key": "token"}}
    data = {"mountPath": "/data", "uri": "https://host/data/"}
    pods = rendered(model, data)
    _, fetch = pods["controller"]["initContainers"]
    assert fetch["image"] == "trainer:1" and fetch["name"] == "fetch"
    (command,) = fetch["args"]
    assert "; python3 -m grpo_worker.volumes.fetch model=/store/volumes/" in command
    assert " data=/store/volumes/" in command
    secret = {"name": "hub", "key": "token", "optional": True}
    assert {"name": "GRPO_MODEL_CREDENTIAL", "valueFrom": {"secretKeyRef": secret}} in fetch["env"]
    assert {m["mountPath"] for m in fetch["volumeMounts"]} == {"/etc/grpo", "/store/volumes", "/tmp"}
    assert "readOnly" not in mounts(pods["controller"], "/store/volumes")["fetch"]
    everything = [c for pod in pods.values() for c in [*pod["containers"], *pod.get("initContainers", [])]]
    assert [c["name"] for c in everything if "secretKeyRef" in str(c["env"])] == ["fetch"]


def test_the_folder_in_the_store_depends_on_source_and_content() -> None:
    def place(**more: Any) -> str:
        return str(mounts(rendered(URI | more)["trainer"], more.get("mountPath", "/models"))["ray-worker"])

    same = place(credential={"secret": "hub"})
    assert same == place()
    others = [
        place(uri="hf://org/model@v2"), place(endpoint="https://mirror"), place(digest="sha256:" + "0" * 64)
    ]  # fmt: skip
    assert len({same, *others}) == 4


def test_an_overlay_applies_to_the_fetch_container() -> None:
    env = [{"name": "AWS_PROFILE", "value": "p"}]
    overlay = {"spec": {"initContainers": [{"name": "fetch", "env": env}]}}
    controller = {"podTemplate": overlay}
    _, fetch = rendered(URI, controller=controller)["controller"]["initContainers"]
    assert env[0] in fetch["env"] and fetch["image"] == "trainer:1"


def _pool_spec(source: dict[str, Any]) -> RolloutPoolSpec:
    model = {"path": "/models/tiny", "volume": {"mountPath": "/models"} | source}
    return RolloutPoolSpec.model_validate(pool_of(spec_of(job())).wire() | {"model": model})


def test_engines_without_a_job_mount_the_model_but_cannot_fetch_it() -> None:
    spec = _pool_spec({"pvc": "models"})
    check_pool(spec)
    owner = job() | {"kind": "RolloutPool"}
    (group,) = pool_cluster(owner, spec, SETTINGS).wire()["spec"]["workerGroupSpecs"]
    pod = group["template"]["spec"]
    assert set(mounts(pod, "/models")) == {"engine"} and volume(pod, "model-files")
    with pytest.raises(RefusedError, match=r"spec\.model\.volume\.uri=hf://a/b: .* has none: set .*\.pvc"):
        check_pool(_pool_spec({"uri": "hf://a/b"}))


def test_a_job_and_its_pool_may_mount_one_model_from_different_volumes() -> None:
    manifest = job(rollout={"poolRef": {"name": "shared"}}, model={"path": "/models/tiny", "volume": URI})
    check_reference(spec_of(manifest), _pool_spec({"pvc": "models"}))
    manifest["spec"]["model"]["path"] = "/models/other"
    with pytest.raises(RefusedError, match="use the same model in both"):
        check_reference(spec_of(manifest), _pool_spec({"pvc": "models"}))


@pytest.mark.parametrize("taken", ["/opt", "/opt/grpo-operator", "/root", "/var/lib", "/lib64"])
def test_a_mount_over_a_path_of_the_image_is_refused(taken: str) -> None:
    with pytest.raises(
        ValueError, match=rf"mountPath must not lie in .*choose another.*got mountPath: {taken}\)"
    ):
        VolumeSpec.model_validate({"mountPath": taken, "pvc": "models"})
    VolumeSpec.model_validate({"mountPath": "/optical", "pvc": "models"})
