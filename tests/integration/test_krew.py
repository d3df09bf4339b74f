"""``kubectl grpo`` as krew installs it: the package of this machine's platform, found and run by kubectl."""

import os
import platform
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml

from grpo_devcluster.gobuild import binary, build_all, link_tools
from grpo_devcluster.paths import REPO
from grpo_devcluster.release import krew
from grpo_operator import __version__

pytestmark = pytest.mark.slow  # builds krew, and the package of each platform
ARCH = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]


@pytest.fixture(scope="module", autouse=True)
def operator() -> None:
    """These tests need none."""


def test_krew_installs_the_package_and_kubectl_runs_it(tmp_path: Path) -> None:
    build_all(("krew", "kubectl"))
    (own,) = (p for p in krew.PLATFORMS if (p.os, p.arch) == ("linux", ARCH))
    manifest = krew.package([own], "https://example.com/v1", tmp_path / "package")
    spec = yaml.safe_load(manifest.read_text())["spec"]
    assert spec["version"] == f"v{__version__}"
    with tarfile.open(manifest.with_name(own.archive)) as archive:
        # The wheel's own files: type checkers of its users look for this one.
        assert "packages/grpo_operator/py.typed" in archive.getnames()
    root = tmp_path / "krew"
    install = [
        binary("krew"),
        "install",
        "--manifest",
        manifest,
        "--archive",
        manifest.with_name(own.archive),
    ]
    # krew compares the archive with the digest in the manifest.
    _run(install, os.environ | {"KREW_ROOT": str(root)})
    tools = link_tools(["kubectl"], tmp_path / "tools")
    path = os.pathsep.join(map(str, (root / "bin", tools, Path(sys.executable).parent, "/usr/bin", "/bin")))
    job = REPO / "manifests" / "tiny-moe.yaml"
    report = _run(["kubectl", "grpo", "plan", job], {"PATH": path, "HOME": str(tmp_path)})
    assert "tiny-moe" in report and "2" in report


def _run(command: list[object], environment: dict[str, str]) -> str:
    done = subprocess.run(
        list(map(str, command)), env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
