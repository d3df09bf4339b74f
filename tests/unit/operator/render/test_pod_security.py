"""Users, capabilities and mounts of pods. integration/test_pod_security.py asks a real API server."""

import os
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

from grpo_operator.render.pod_security import USER
from grpo_operator.render.ray_cluster import job_cluster
from grpo_operator.settings import OperatorSettings
from support.objects import job, pool_of, spec_of

SETTINGS = OperatorSettings("trainer:1", "rollout:1")
FOLDER = "/store/default-tiny-moe-12345678"
PVC = {"store": {"pvc": "checkpoints"}}
RDMA = {"devices": [{"resource": "rdma/hca"}]}


def pods(**spec: Any) -> dict[str, dict[str, Any]]:
    """Return the PodSpecs of the tiny job by pool, with changes to its spec."""
    manifest = job(**spec)
    parsed = spec_of(manifest)
    made = job_cluster(manifest, parsed, pool_of(parsed), SETTINGS, False).wire()["spec"]
    groups = {group["groupName"]: group["template"]["spec"] for group in made["workerGroupSpecs"]}
    return groups | {"head": made["headGroupSpec"]["template"]["spec"]}


def on_gpus(**scheduling: Any) -> dict[str, dict[str, Any]]:
    trainer = job()["spec"]["trainer"] | {"device": "cuda", "gpuType": "h100-80gb"}
    return pods(checkpoint=PVC, trainer=trainer, scheduling=scheduling)


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod.get("initContainers", []), *pod["containers"]]


def test_no_pod_runs_as_root_or_writes_outside_its_volumes() -> None:
    for pool, pod in pods(checkpoint=PVC).items():
        assert pod["securityContext"] == {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        assert not [volume for volume in pod["volumes"] if "hostPath" in volume]
        for container in containers(pod):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
                "readOnlyRootFilesystem": True,
            }, (pool, container["name"])
            (scratch,) = [m for m in container["volumeMounts"] if m["mountPath"] == "/tmp"]
            assert {"name": scratch["name"], "emptyDir": {}} in pod["volumes"], "of its own"
            env = {e["name"]: e.get("value") for e in container["env"]}
            assert env["HOME"] == "/tmp" and env["USER"], "libraries keep their caches in the home directory"
            paths = [mount["mountPath"] for mount in container["volumeMounts"]]
            assert len(paths) == len(set(paths)), "the API server refuses two mounts at one path"


def test_what_users_set_replaces_the_default() -> None:
    given = {
        "runAsUser": 1000,
        "runAsGroup": 2000,
        "fsGroup": 3000,
        "supplementalGroups": [4000],
        "readOnlyRootFilesystem": False,
    }
    for pod in pods(checkpoint=PVC, scheduling={"securityContext": given}).values():
        context = pod["securityContext"]
        assert {name: context[name] for name in given if name in context} == {
            name: value for name, value in given.items() if name != "readOnlyRootFilesystem"
        }
        assert not any(c["securityContext"]["readOnlyRootFilesystem"] for c in containers(pod))
    for pod in pods(checkpoint=PVC, scheduling={"securityContext": {"runAsUser": 0}}).values():
        context = pod["securityContext"]
        assert (context["runAsUser"], context["runAsGroup"], context["runAsNonRoot"]) == (0, 0, False)


def test_a_pod_template_has_the_last_word() -> None:
    root = {"runAsUser": 0, "runAsNonRoot": False}
    overlay = {
        "securityContext": root,
        "containers": [{"name": "ray-worker", "securityContext": {"capabilities": {"add": ["SYS_PTRACE"]}}}],
    }
    trainer = job()["spec"]["trainer"] | {"podTemplate": {"spec": overlay}}
    made = pods(checkpoint=PVC, trainer=trainer)
    assert root.items() <= made["trainer"]["securityContext"].items()
    (ranks,) = made["trainer"]["containers"]
    assert ranks["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["SYS_PTRACE"]}
    assert ranks["securityContext"]["allowPrivilegeEscalation"] is False
    assert made["controller"]["securityContext"]["runAsUser"] == USER


def test_rdma_needs_root_unless_the_nodes_are_prepared_for_another_user() -> None:
    """Linux gives a capability only to root, or by ambient capabilities, which Kubernetes cannot set."""
    for pool, pod in on_gpus(rdma=RDMA).items():
        assert pod["securityContext"]["runAsUser"] == 0, "one user for all who write to the job's folder"
        adding = [c["name"] for c in containers(pod) if "add" in c["securityContext"]["capabilities"]]
        assert adding == (["ray-worker"] if pool == "trainer" else [])
    for pod in on_gpus(rdma=RDMA, securityContext={"runAsUser": 1000}).values():
        assert pod["securityContext"]["runAsUser"] == 1000 and "IPC_LOCK" not in str(pod)


def test_pods_that_share_a_nodes_sockets_are_root_which_owns_the_folder() -> None:
    spec = job()["spec"]
    trainer = spec["trainer"] | {"device": "cuda", "gpuType": "h100-80gb", "nodes": 1, "gpusPerNode": 2}
    trainer["offload"] = {"parameters": True, "gradients": True, "optimizer": True}
    template = spec["rollout"]["template"] | {"replicas": 1}
    template["engine"] = {"tensorParallel": 2, "gpusPerNode": 2, "contextLength": 256}
    sync = {"transport": "cuda-ipc"}
    made = pods(
        checkpoint=PVC, trainer=trainer, rollout={"template": template}, mode="colocated", weightSync=sync
    )
    assert {pod["securityContext"]["runAsUser"] for pod in made.values()} == {0}
    shared = [pool for pool, pod in made.items() if "hostPath" in str(pod["volumes"])]
    assert sorted(shared) == ["rollout", "trainer"]


def _store(container: dict[str, Any]) -> dict[str, bool]:
    """Return the paths of the store that a container sees, and whether it may write there."""
    mounts = [mount for mount in container["volumeMounts"] if mount["name"] == "store"]
    for mount in mounts:
        assert mount["mountPath"] == f"/store/{mount.get('subPath', '')}".rstrip("/")
    return {mount["mountPath"]: not mount.get("readOnly", False) for mount in mounts}


def test_containers_see_only_the_jobs_folder_of_the_store() -> None:
    made = pods(checkpoint=PVC)
    assert {c["name"]: _store(c) for pod in made.values() for c in pod["containers"]} == {
        "ray-head": {},
        "controller": {FOLDER: True},
        "ray-worker": {FOLDER: True},
        "engine": {FOLDER: False},
        "agent": {FOLDER: False, f"{FOLDER}/logs": True},
    }
    (agent,) = (c for c in made["trainer"]["initContainers"] if c["name"] == "agent")
    assert _store(agent) == {f"{FOLDER}/logs": True}
    for pool in ("controller", "trainer", "rollout"):
        first = made[pool]["initContainers"][0]
        assert first["name"] == "prepare-store" and _store(first) == {"/store": True}


@pytest.mark.parametrize("named", ["/store/shared.jsonl", "file:///store/shared.jsonl"])
def test_the_whole_store_can_be_read_if_the_spec_names_a_path_in_it(named: str) -> None:
    data = job()["spec"]["data"] | {"train": named}
    made = pods(checkpoint=PVC, data=data, reward={"builtin": "math"})
    for pool, writes in (("controller", True), ("trainer", True), ("rollout", False)):
        for container in made[pool]["containers"]:
            found = _store(container)
            assert found.pop(f"{FOLDER}/logs", container["name"] == "agent") == (container["name"] == "agent")
            assert found == {"/store": False, FOLDER: writes}


@pytest.mark.parametrize("other", ["s3://bucket/store/a.jsonl", "/data/store/a.jsonl", "/stores/a.jsonl"])
def test_other_paths_with_the_word_are_no_paths_in_the_store(other: str) -> None:
    data = job()["spec"]["data"] | {"train": other}
    (container,) = pods(checkpoint=PVC, data=data, reward={"builtin": "math"})["controller"]["containers"]
    assert _store(container) == {FOLDER: True}


def test_a_directory_of_the_nodes_is_prepared_by_root_unless_the_user_is_named() -> None:
    path = {"store": {"path": "/mnt/store"}}
    capable = {"drop": ["ALL"], "add": ["CHOWN", "DAC_OVERRIDE", "FOWNER"]}
    for pod in pods(checkpoint=path).values():
        for container in containers(pod):
            root = container["securityContext"].get("runAsUser") == 0
            assert root == (container["name"] == "prepare-store")
            assert (container["securityContext"]["capabilities"] == capable) == root
    named = pods(checkpoint=path, scheduling={"securityContext": {"runAsUser": 1000}})
    assert not any("runAsUser" in c["securityContext"] for pod in named.values() for c in containers(pod))


def _prepare(root: Path, **spec: Any) -> None:
    """Run the first init container of the controller's pod as this user, in a store of its own."""
    command = pods(**spec)["controller"]["initContainers"][0]
    script = command["args"][0].replace("/store", str(root))
    subprocess.run([*command["command"], script], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_root_gives_a_new_folder_and_one_of_an_older_release_to_the_jobs_user(tmp_path: Path) -> None:
    folder = tmp_path / Path(FOLDER).name
    path = {"store": {"path": "/mnt/nodes"}}
    for _ in range(2):  # every pod of the job does it
        _prepare(tmp_path, checkpoint=path)
        assert (folder.stat().st_uid, folder.stat().st_gid) == (USER, USER)
        assert (folder / "logs").stat().st_uid == USER
    old = folder / "checkpoints" / "step-5"
    old.mkdir(parents=True)
    os.chown(folder, 0, 0)
    _prepare(tmp_path, checkpoint=path)
    assert {path.stat().st_uid for path in (folder, old.parent, old)} == {USER}
    (folder / "logs").rmdir()  # as of a release before them
    _prepare(tmp_path, checkpoint=path)
    assert (folder / "logs").stat().st_uid == USER
    assert tmp_path.stat().st_uid == 0, "the rest of the store belongs to others"


def test_the_folder_of_fetched_files_is_open_to_jobs_of_other_users(tmp_path: Path) -> None:
    model = {"path": "/models/tiny", "volume": {"mountPath": "/models", "uri": "hf://org/model"}}
    for _ in range(2):
        _prepare(tmp_path, checkpoint=PVC, model=model)
    shared = tmp_path / "volumes"
    assert stat.S_IMODE(shared.stat().st_mode) == 0o1777 and (tmp_path / Path(FOLDER).name).is_dir()
