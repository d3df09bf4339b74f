"""Every path in a manifest lies within a mount of each pod that reads it.

Manifests are those in ``manifests/`` and the YAML blocks of the documentation.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.rolloutpool import RolloutPoolSpec, RolloutTemplate
from grpo_operator.api.v1alpha1.volumes import within
from grpo_operator.cli.plan import main
from grpo_operator.render.ray_cluster import job_cluster, pool_cluster
from grpo_operator.settings import OperatorSettings

ROOT = Path(__file__).parents[4]
MANIFESTS = sorted((ROOT / "manifests").glob("*.yaml"))
BLOCK = re.compile(r"^```ya?ml\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SETTINGS = OperatorSettings("trainer:1", "rollout:1")
# The container of each pool that reads files.
READERS = {"controller": "controller", "trainer": "ray-worker", "rollout": "engine"}


def texts() -> Iterator[tuple[str, str]]:
    for path in MANIFESTS:
        yield path.name, path.read_text()
    for page in PAGES:
        for number, block in enumerate(BLOCK.findall(page.read_text())):
            yield f"{page.name}-{number}", block


def named_paths(kind: str, body: dict[str, Any]) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Return (field, absolute path, pools that read it)."""
    data, reward = body.get("data", {}), body.get("reward", {})
    model = ("rollout",) if kind == "RolloutPool" else ("controller", "trainer", "rollout")
    found = [
        ("model.path", body["model"]["path"], model),
        ("reward.model.path", reward.get("model", {}).get("path", ""), ("trainer",)),
        ("data.train", data.get("train", ""), ("controller",)),
    ]
    for field, place in (("data.filter", data), ("data.order", data), ("reward.function", reward)):
        file = place.get(field.partition(".")[2], "").partition(":")[0]
        found.append((field, file, ("controller",)))
    yield from (entry for entry in found if entry[1].startswith("/"))


def rendered(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the PodSpecs by pool, overlays included."""
    owner = document | {"metadata": document["metadata"] | {"namespace": "default", "uid": "12345678-a"}}
    if document["kind"] == "RolloutPool":
        cluster = pool_cluster(owner, RolloutPoolSpec.model_validate(document["spec"]), SETTINGS)
    else:
        spec = GRPOJobSpec.model_validate(document["spec"])
        pool: RolloutTemplate | None = spec.rollout.template
        cluster = job_cluster(owner, spec, pool, SETTINGS, False)
    groups = cluster.wire()["spec"]["workerGroupSpecs"]
    return {group["groupName"]: group["template"]["spec"] for group in groups}


def unmounted(document: dict[str, Any]) -> list[str]:
    """Return paths that are read but not mounted. Engines of a standing pool are checked with that pool."""
    pods = rendered(document)
    return [
        f"{field}={path}: {pool}"
        for field, path, pools in named_paths(document["kind"], document["spec"])
        for pool in pools
        if pool in pods and not _is_mounted(pods[pool], READERS[pool], path)
    ]


def _is_mounted(pod: dict[str, Any], reader: str, path: str) -> bool:
    (container,) = [c for c in pod["containers"] if c["name"] == reader]
    volumes = {volume["name"] for volume in pod["volumes"]}
    mounts = [m for m in container["volumeMounts"] if m["name"] in volumes]
    return any(within(path, mount["mountPath"]) for mount in mounts)


@pytest.mark.parametrize("text", [pytest.param(text, id=name) for name, text in texts()])
def test_every_path_is_mounted(text: str) -> None:
    for document in yaml.safe_load_all(text):
        assert unmounted(document) == []


def test_the_manifests_contain_paths() -> None:
    fields = [
        field
        for _, text in texts()
        for document in yaml.safe_load_all(text)
        for field, _, _ in named_paths(document["kind"], document["spec"])
    ]
    assert fields.count("model.path") >= 5
    assert {"data.train", "data.filter", "reward.function"} <= set(fields)


def test_an_unmounted_path_is_found() -> None:
    document = yaml.safe_load((ROOT / "manifests" / "qwen3-8b-8gpu.yaml").read_text())
    body = document["spec"]
    body["reward"] = {"function": "/code/reward.py:score", "model": {"path": "/scores/model"}}
    assert unmounted(document) == [
        "reward.model.path=/scores/model: trainer",
        "reward.function=/code/reward.py: controller",
    ]
    del body["model"]["volume"], body["data"]["volume"]
    assert unmounted(document)[:3] == [f"model.path=/models/Qwen3-8B: {pool}" for pool in READERS]
    mount = {"volumeMounts": [{"name": "m", "mountPath": "/models"}], "name": "engine"}
    volumes = [{"name": "m", "persistentVolumeClaim": {"claimName": "models"}}]
    body["rollout"]["template"]["podTemplate"] = {"spec": {"containers": [mount], "volumes": volumes}}
    assert "model.path=/models/Qwen3-8B: rollout" not in unmounted(document)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_the_planner_accepts_a_manifest(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(path)]) == 0, capsys.readouterr().out
