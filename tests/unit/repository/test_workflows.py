"""Workflows of GitHub run what the Makefile has, with pinned actions and no rights that they do not need."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_devcluster.paths import REPO

WORKFLOWS = sorted((REPO / ".github" / "workflows").glob("*.yaml"))
MAKEFILE = (REPO / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z0-9-]+):", MAKEFILE, re.MULTILINE))
CALL = re.compile(r"\bmake((?: +(?:[A-Z]+=\S+|-s|[\w-]+))+)")
READ = {"contents": "read"}
RIGHTS = {
    "ci": {"check": READ, "site": READ},
    "release": {
        "check": READ,
        "publish": READ | {"packages": "write"},
        "release": {"contents": "write"},
        "site": {"contents": "write"},
    },
}
CALLED = {
    "ci": {"check", "site"},
    "release": {"test", "version", "publish-images", "publish-chart", "sbom", "krew", "publish-site"},
}
each_workflow = pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: str(file.stem))


def _content(file: Path) -> dict[Any, Any]:
    return dict(yaml.safe_load(file.read_text()))


def _steps(file: Path) -> list[dict[str, Any]]:
    return [step for job in _content(file)["jobs"].values() for step in job["steps"]]


@each_workflow
def test_every_make_target_and_variable_of_a_workflow_exists(file: Path) -> None:
    calls = [call for step in _steps(file) for call in CALL.findall(step.get("run", ""))]
    words = [word for call in calls for word in call.split() if not word.startswith("-")]
    assert {word for word in words if "=" not in word} == CALLED[file.stem] <= TARGETS
    variables = {word.partition("=")[0] for word in words if "=" in word}
    assert all(f"$({name})" in MAKEFILE for name in variables)


@each_workflow
def test_every_action_is_pinned_by_a_commit_whose_release_is_named(file: Path) -> None:
    used = re.findall(r"uses: (.+)$", file.read_text(), re.MULTILINE)
    assert len(used) == len([step for step in _steps(file) if "uses" in step]) > 0
    for line in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line), line


@each_workflow
def test_each_job_has_only_the_rights_that_it_needs(file: Path) -> None:
    workflow = _content(file)
    assert workflow["permissions"] == {}
    assert {name: job["permissions"] for name, job in workflow["jobs"].items()} == RIGHTS[file.stem]
    for step in _steps(file):
        if step.get("uses", "").startswith("actions/checkout"):
            assert step["with"]["persist-credentials"] is False


@each_workflow
def test_values_of_a_run_reach_scripts_as_variables_only(file: Path) -> None:
    """An expression within a script is text of the script: a tag's name could add commands."""
    assert not [step for step in _steps(file) if "${{" in step.get("run", "")]


def test_ci_runs_for_pull_requests_and_on_main() -> None:
    (file,) = (file for file in WORKFLOWS if file.stem == "ci")
    # YAML 1.1 reads the key `on` as true.
    assert _content(file)[True] == {"pull_request": None, "push": {"branches": ["main"]}}
    assert not any("needs" in job for job in _content(file)["jobs"].values())


def test_code_of_pull_requests_runs_on_hosted_machines_only() -> None:
    (file,) = (file for file in WORKFLOWS if file.stem == "ci")
    assert {job["runs-on"] for job in _content(file)["jobs"].values()} == {"ubuntu-24.04"}
