"""What pods of jobs may take of their nodes: nothing by default, and manifests say what they need."""

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_devcluster.install import devcluster_values
from support.chart import Objects, of, render
from support.manifests import MANIFESTS, OWN_KINDS, cluster, documents, name_of

PERMISSIONS = ("privileged", "hostPID", "hostNetwork", "hostPath", "serviceAccount", "masterKey")
JOBS = [file for file in MANIFESTS if file.parent.name != "policies"]


def _policy(objects: Objects) -> dict[str, Any]:
    (policy,) = of(objects, "ValidatingAdmissionPolicy", "ops-pods")
    return dict(policy["spec"])


def _allowed(objects: Objects) -> str:
    """Return the list of what is allowed everywhere, as the policy has it."""
    (found,) = [v["expression"] for v in _policy(objects)["variables"] if v["name"] == "allowed"]
    return str(found).partition(" ")[0]


def test_nothing_of_nodes_is_allowed_by_default() -> None:
    assert _allowed(render()) == "[]"
    assert _allowed(render("--set", "admissionPolicies.pods.allow={hostPath}")) == "['hostPath']"


@pytest.mark.parametrize("name", PERMISSIONS)
def test_a_refusal_names_the_label_that_allows_it(name: str) -> None:
    validations = _policy(render())["validations"]
    (found,) = [each for each in validations if f"'{name}' in variables.allowed" in each["expression"]]
    assert f"needs the label rl.grpo.dev/allow-{name}=true of the namespace" in found["message"]


def test_the_devcluster_allows_its_store(tmp_path: Path) -> None:
    values = tmp_path / "values.json"
    values.write_text(json.dumps(devcluster_values({"operator": "o:1", "trainer": "t:1", "rollout": "r:1"})))
    assert _allowed(render("-f", str(values))) == "['hostPath']"


@pytest.mark.parametrize("file", JOBS, ids=name_of)
def test_a_manifest_says_what_its_namespace_must_allow(file: Path) -> None:
    text = file.read_text()
    templates = str([cluster(made) for made in documents(text) if made["kind"] in OWN_KINDS])
    comment = [line for line in text.splitlines() if line.startswith("#")]
    for name in ("hostPath", "hostNetwork"):
        command = f"#   kubectl label namespace NAMESPACE rl.grpo.dev/allow-{name}=true"
        assert (command in comment) == (f"'{name}'" in templates), name
