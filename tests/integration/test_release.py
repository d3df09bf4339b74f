"""A release as users get it: images and chart in a real registry; and the workflows that GitHub runs."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from grpo_devcluster.gobuild import binary, build_all
from grpo_devcluster.images import IMAGES
from grpo_devcluster.install import CHART
from grpo_devcluster.paths import REPO
from grpo_devcluster.release import chart, images
from grpo_operator import __version__
from support.oci_registry import digest_in, oci_registry

pytestmark = pytest.mark.slow  # builds images, a registry and actionlint


@pytest.fixture(scope="module", autouse=True)
def operator() -> None:
    """These tests need none."""


@pytest.fixture(scope="module")
def registry() -> Iterator[str]:
    with oci_registry() as host:
        yield host


def _helm(*arguments: object) -> str:
    build_all(("helm",))
    command = [str(binary("helm")), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _pulled(registry: str, folder: Path) -> Path:
    """Publish nothing; fetch the chart as users do and return its package."""
    source = f"oci://{registry}/grpo-operator"
    _helm("pull", source, "--version", __version__, "--plain-http", "--destination", folder)
    return folder / f"grpo-operator-{__version__}.tgz"


def test_a_pulled_chart_renders_what_the_folder_renders(registry: str, tmp_path: Path) -> None:
    chart.push(chart.package(tmp_path / "made"), f"{registry}/plain", plain_http=True)
    pulled = _pulled(f"{registry}/plain", tmp_path)
    values = ("--set", "metrics.podMonitor=true,metrics.prometheusRule=true,metrics.dashboards=true")
    rendered = [_helm("template", "ops", source, "--include-crds", *values) for source in (pulled, CHART)]
    assert rendered[0] == rendered[1] and "kind: CustomResourceDefinition" in rendered[0]


@pytest.fixture
def layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A storage of buildah's own for the test."""
    file = tmp_path / "storage.conf"
    roots = f'graphroot = "{tmp_path}/layers"\nrunroot = "{tmp_path}/run"\n'
    file.write_text(f'[storage]\ndriver = "vfs"\n{roots}')
    monkeypatch.setenv("CONTAINERS_STORAGE_CONF", str(file))


def _empty_image(name: str, labelled: str) -> None:
    container = _buildah("from", "scratch").strip()
    _buildah("config", "--label", f"name={labelled}", container)
    _buildah("commit", "--quiet", "--rm", container, name)


def _buildah(*arguments: str) -> str:
    return subprocess.run(["buildah", *arguments], capture_output=True, text=True, check=True).stdout


@pytest.mark.usefixtures("layers")
def test_a_published_chart_names_the_pushed_images_by_digest(registry: str, tmp_path: Path) -> None:
    """The images are empty here: only an index of packages and bases would fill them."""
    digests, source = tmp_path / "digests", f"{registry}/team"
    for name in IMAGES:
        target = images.reference(source, name, __version__)
        _empty_image(target, name)
        pushed = images.push("buildah", name, target, digests, plain_http=True)
        assert digest_in(registry, f"team/{name}", __version__) == pushed
    made = chart.package(tmp_path / "made", source, digests, "https://git.example.com/team/grpo-operator")
    chart.push(made, source, plain_http=True)
    package = _pulled(source, tmp_path)
    pinned = {
        name: f"{source}/{name}:{__version__}@{digest_in(registry, f'team/{name}', __version__)}"
        for name in IMAGES
    }
    rendered = _helm("template", "ops", package)
    assert all(image in rendered for image in pinned.values()) and rendered.count(pinned["operator"]) == 2
    about = yaml.safe_load(_helm("show", "chart", package))
    listed = yaml.safe_load(about["annotations"]["artifacthub.io/images"])
    assert {entry["name"]: entry["image"] for entry in listed} == pinned
    assert about["sources"] == [about["home"]] == ["https://git.example.com/team/grpo-operator"]


def test_the_workflows_are_valid_for_github() -> None:
    build_all(("actionlint",))
    files = sorted((REPO / ".github" / "workflows").glob("*.yaml"))
    command = [str(binary("actionlint")), "-no-color", *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPO)
    assert done.returncode == 0, done.stdout + done.stderr
