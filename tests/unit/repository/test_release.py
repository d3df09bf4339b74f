"""One version for everything that a release publishes, and nothing that is published unchecked."""

import re
import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from grpo_devcluster.gobuild import COMPONENTS, MODULES
from grpo_devcluster.install import CHART
from grpo_devcluster.paths import REPO
from grpo_devcluster.release import chart, images, version
from grpo_devcluster.stages import StageError
from grpo_operator import __version__

WORKFLOW = REPO / ".github" / "workflows" / "release.yaml"


def _workflow() -> dict[str, Any]:
    return dict(yaml.safe_load(WORKFLOW.read_text()))


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


def test_artifact_hub_is_told_of_each_crd() -> None:
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert about["maintainers"][0]["name"] and about["description"]
    listed = yaml.safe_load(about["annotations"]["artifacthub.io/crds"])
    assert all(entry["displayName"] and entry["description"] for entry in listed)
    crds = [yaml.safe_load(file.read_text()) for file in sorted((REPO / "crds").glob("*.yaml"))]
    assert [(entry["name"], entry["kind"], entry["version"]) for entry in listed] == [
        (crd["metadata"]["name"], crd["spec"]["names"]["kind"], served["name"])
        for crd in crds
        for served in crd["spec"]["versions"]
    ]


def test_a_released_chart_has_home_sources_and_an_icon_of_the_repository(checkout: Path) -> None:
    metadata, source = checkout / "helm/grpo-operator/Chart.yaml", "https://git.example.com/team/grpo"
    before = yaml.safe_load(metadata.read_text())
    chart.name_source(metadata, source)
    added = {"home": source, "sources": [source], "icon": f"{source}/raw/v{__version__}/{chart.ICON}"}
    assert not before.keys() & added.keys()
    assert yaml.safe_load(metadata.read_text()) == before | added
    icon = ElementTree.parse(REPO / chart.ICON).getroot()
    assert icon.tag == "{http://www.w3.org/2000/svg}svg" and icon.attrib["viewBox"] == "0 0 64 64"
    assert "SOURCE=" in next(step["run"] for step in _publishing() if "publish-chart" in step.get("run", ""))


def _publishing() -> list[dict[str, Any]]:
    return list(_workflow()["jobs"]["publish"]["steps"])


def test_nothing_is_published_before_the_checks_have_passed() -> None:
    jobs = _workflow()["jobs"]
    assert "needs" not in jobs["check"]
    assert (jobs["publish"]["needs"], jobs["release"]["needs"]) == ("check", "publish")


def test_the_workflow_names_no_registry() -> None:
    hosts = re.findall(r"[\w.-]+\.(?:io|com|dev|org|net)\b", WORKFLOW.read_text())
    assert set(hosts) <= {"users.noreply.github.com"}, "but for the address of who commits the site"


def test_tools_of_the_checks_are_pinned() -> None:
    for name in ("actionlint", "registry", "glua", "krew"):
        component = COMPONENTS[name]
        assert f"tool {component.package}\n" in (MODULES / component.module / "go.mod").read_text()
