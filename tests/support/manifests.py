"""Documents of manifests, the pods that the operator makes of them, and the files that these read."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from grpo_devcluster.paths import REPO
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.rolloutpool import RolloutPoolSpec
from grpo_operator.api.v1alpha1.volumes import within
from grpo_operator.render.ray_cluster import job_cluster, pool_cluster
from grpo_operator.settings import OperatorSettings

MANIFESTS = sorted((REPO / "manifests").rglob("*.yaml"))
SETTINGS = OperatorSettings("trainer:1", "rollout:1")
OWN_KINDS = ("GRPOJob", "RolloutPool")
# The container of each pool that reads files.
READERS = {"controller": "controller", "trainer": "ray-worker", "rollout": "engine"}
UID = "12345678-a"


def name_of(file: Path) -> str:
    """Return the name of a manifest in test ids."""
    return file.relative_to(REPO / "manifests").as_posix().removesuffix(".yaml")


def documents(text: str) -> list[dict[str, Any]]:
    """Return the objects of a YAML file."""
    return [document for document in yaml.safe_load_all(text) if document]


def cluster(document: dict[str, Any]) -> dict[str, Any]:
    """Return the RayCluster of a GRPOJob or RolloutPool, overlays included."""
    owner = document | {"metadata": document["metadata"] | {"namespace": "default", "uid": UID}}
    if document["kind"] == "RolloutPool":
        return pool_cluster(owner, RolloutPoolSpec.model_validate(document["spec"]), SETTINGS).wire()
    spec = GRPOJobSpec.model_validate(document["spec"])
    return job_cluster(owner, spec, spec.rollout.template, SETTINGS, False).wire()


def pods(rendered: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the PodSpecs of a RayCluster by pool."""
    groups = rendered["spec"]["workerGroupSpecs"]
    return {group["groupName"]: group["template"]["spec"] for group in groups}


def named_files(document: dict[str, Any]) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Return (field, value, pools that read it) of each model, data source and Python function."""
    if document["kind"] not in OWN_KINDS:
        return
    body = document["spec"]
    data, reward = body.get("data", {}), body.get("reward", {})
    model = ("rollout",) if document["kind"] == "RolloutPool" else ("controller", "trainer", "rollout")
    yield "model.path", body["model"]["path"], model
    if "model" in reward:
        yield "reward.model.path", reward["model"]["path"], ("trainer",)
    for field, place in (("data.train", data), ("data.filter", data), ("data.order", data)):
        if field.partition(".")[2] in place:
            yield field, place[field.partition(".")[2]], ("controller",)
    if "function" in reward:
        yield "reward.function", reward["function"], ("controller",)
    for entry in body.get("validation", {}).get("sets", []):
        yield f"validation.sets {entry['name']}", entry["data"], ("controller",)


def file_of(value: str) -> str:
    """Return the path that a model, a data source or a function names; "" if it names none."""
    return value.partition(":")[0] if value.startswith("/") else ""


def mount_of(pod: dict[str, Any], pool: str, path: str) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return the volume and the mount from which the pool's main container reads a path."""
    (container,) = [c for c in pod["containers"] if c["name"] == READERS[pool]]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = [m for m in container["volumeMounts"] if m["name"] in volumes and within(path, m["mountPath"])]
    if not mounts:
        return None
    mount = max(mounts, key=lambda each: len(each["mountPath"]))
    return volumes[mount["name"]], mount
