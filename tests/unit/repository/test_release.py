"""One version for everything that a release publishes, and a workflow that runs what the Makefile has."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_devcluster.gobuild import COMPONENTS, MODULES
from grpo_devcluster.install import CHART
from grpo_devcluster.paths import REPO
from grpo_devcluster.release import chart, images, version
from grpo_devcluster.stages import StageError
from grpo_operator import __version__

WORKFLOW = REPO / ".github" / "workflows" / "release.yaml"
MAKEFILE = (REPO / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z0-9-]+):", MAKEFILE, re.MULTILINE))
CALL = re.compile(r"\bmake((?: +(?:[A-Z]+=\S+|-s|[\w-]+))+)")


def _workflow() -> dict[str, Any]:
    return dict(yaml.safe_load(WORKFLOW.read_text()))


def _steps() -> list[dict[str, Any]]:
    return [step for job in _workflow()["jobs"].values() for step in job["steps"]]


def test_the_chart_has_the_version_of_the_code() -> None:
    metadata = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert metadata["version"] == metadata["appVersion"] == version.current() == __version__
    named = [line for line in (CHART / "values.yaml").read_text().splitlines() if __version__ in line]
    assert not named, "values name the version themselves"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in (version.SOURCE, Path("helm/grpo-operator/Chart.yaml")):
        (tmp_path / name).parent.mkdir(parents=True)
        shutil.copy(REPO / name, tmp_path / name)
    return tmp_path


def test_setting_the_version_changes_code_and_chart_and_nothing_else(checkout: Path) -> None:
    version.set_version("12.0.3", checkout)
    assert version.current(checkout) == "12.0.3"
    metadata = yaml.safe_load((checkout / "helm/grpo-operator/Chart.yaml").read_text())
    assert metadata["version"] == metadata["appVersion"] == "12.0.3"
    version.set_version(__version__, checkout)
    for name in (version.SOURCE, Path("helm/grpo-operator/Chart.yaml")):
        assert (checkout / name).read_text() == (REPO / name).read_text()


@pytest.mark.parametrize("wrong", ["1.2", "v1.2.3", "1.02.3", "1.2.3rc1", ""])
def test_what_is_no_version_is_refused(wrong: str, checkout: Path) -> None:
    with pytest.raises(StageError, match=f"VERSION is '{wrong}'"):
        version.set_version(wrong, checkout)
    assert version.current(checkout) == __version__


def test_a_chart_with_digests_needs_all_of_them(tmp_path: Path) -> None:
    (tmp_path / "operator.digest").write_text("sha256:" + "0f" * 32 + "\n")
    (tmp_path / "trainer.digest").write_text("sha256:0f")
    assert images.digest(tmp_path / "operator.digest") == "sha256:" + "0f" * 32
    with pytest.raises(StageError, match=r"trainer\.digest has no digest"):
        chart.package(tmp_path, "registry.example.com/team", tmp_path)


def test_every_make_target_and_variable_of_the_workflow_exists() -> None:
    calls = [call for step in _steps() for call in CALL.findall(step.get("run", ""))]
    words = [word for call in calls for word in call.split() if not word.startswith("-")]
    targets = {word for word in words if "=" not in word}
    assert {"test", "publish-images", "publish-chart", "sbom", "version"} <= targets <= TARGETS
    variables = {word.partition("=")[0] for word in words if "=" in word}
    assert variables and all(f"$({name})" in MAKEFILE for name in variables)


def test_every_action_is_pinned_by_a_commit_whose_release_is_named() -> None:
    used = re.findall(r"uses: (.+)$", WORKFLOW.read_text(), re.MULTILINE)
    assert len(used) == len([step for step in _steps() if "uses" in step]) > 0
    for line in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line), line


def test_each_job_has_only_the_rights_that_it_needs() -> None:
    workflow = _workflow()
    assert workflow["permissions"] == {}
    assert {name: job["permissions"] for name, job in workflow["jobs"].items()} == {
        "check": {"contents": "read"},
        "publish": {"contents": "read", "packages": "write"},
        "release": {"contents": "write"},
    }
    for step in _steps():
        if step.get("uses", "").startswith("actions/checkout"):
            assert step["with"]["persist-credentials"] is False


def test_nothing_is_published_before_the_checks_have_passed() -> None:
    jobs = _workflow()["jobs"]
    assert "needs" not in jobs["check"]
    assert (jobs["publish"]["needs"], jobs["release"]["needs"]) == ("check", "publish")


def test_values_of_a_run_reach_scripts_as_variables_only() -> None:
    """An expression within a script is text of the script: a tag's name could add commands."""
    assert not [step for step in _steps() if "${{" in step.get("run", "")]


def test_the_workflow_names_no_registry() -> None:
    hosts = re.findall(r"[\w.-]+\.(?:io|com|dev|org|net)\b", WORKFLOW.read_text())
    assert not hosts


def test_tools_of_the_checks_are_pinned() -> None:
    for name in ("actionlint", "registry", "glua", "krew"):
        component = COMPONENTS[name]
        assert f"tool {component.package}\n" in (MODULES / component.module / "go.mod").read_text()
