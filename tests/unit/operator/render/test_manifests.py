"""Every path in a manifest lies within a mount of each pod that reads it.

Manifests are those in ``manifests/`` and the YAML blocks of the documentation.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_devcluster.paths import REPO
from grpo_operator.api.v1alpha1.rolloutpool import RolloutPoolSpec
from grpo_operator.cli.plan import main
from grpo_operator.plan.planner.pool_checks import check_pool
from support.manifests import (
    MANIFESTS,
    OWN_KINDS,
    READERS,
    cluster,
    documents,
    file_of,
    mount_of,
    name_of,
    named_files,
    pods,
)

BLOCK = re.compile(r"^```ya?ml\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = [REPO / "README.md", *sorted((REPO / "docs").rglob("*.md"))]
JOBS = [file for file in MANIFESTS if file.parent.name != "policies"]


def texts() -> Iterator[tuple[str, str]]:
    for path in MANIFESTS:
        yield name_of(path), path.read_text()
    for page in PAGES:
        for number, block in enumerate(BLOCK.findall(page.read_text())):
            yield f"{page.name}-{number}", block


def unmounted(document: dict[str, Any]) -> list[str]:
    """Return paths that are read but not mounted. Engines of a standing pool are checked with that pool."""
    if document["kind"] not in OWN_KINDS:
        return []
    made = pods(cluster(document))
    return [
        f"{field}={path}: {pool}"
        for field, value, pools in named_files(document)
        for pool in pools
        if (path := file_of(value)) and pool in made and mount_of(made[pool], pool, path) is None
    ]


@pytest.mark.parametrize("text", [pytest.param(text, id=name) for name, text in texts()])
def test_every_path_is_mounted(text: str) -> None:
    for document in documents(text):
        assert unmounted(document) == []


def test_the_manifests_contain_paths() -> None:
    fields = [
        field
        for _, text in texts()
        for document in documents(text)
        for field, value, _ in named_files(document)
        if file_of(value)
    ]
    assert fields.count("model.path") >= 5
    assert {"data.train", "data.filter", "reward.function"} <= set(fields)


def test_an_unmounted_path_is_found() -> None:
    document = yaml.safe_load((REPO / "manifests" / "qwen3-8b-8gpu.yaml").read_text())
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


@pytest.mark.parametrize("path", JOBS, ids=name_of)
def test_the_planner_accepts_a_manifest(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(path)]) == 0, capsys.readouterr().out
    for document in documents(path.read_text()):
        if document["kind"] == "RolloutPool":
            check_pool(RolloutPoolSpec.model_validate(document["spec"]))
