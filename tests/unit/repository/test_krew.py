"""The package of ``kubectl grpo`` for krew: its launcher, and archives whose digests can be repeated."""

import os
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from grpo_devcluster.paths import REPO
from grpo_devcluster.release import krew
from grpo_devcluster.stages import StageError


def _launch(folder: Path, pythons: dict[str, int]) -> subprocess.CompletedProcess[str]:
    """Run the launcher where each Python answers the question for its version with an exit status."""
    tools = folder / "tools"
    tools.mkdir()
    for name, status in pythons.items():
        (tools / name).write_text(f'#!/bin/sh\n[ "$1" = -c ] && exit {status}\necho {name} "$@"\n')
        (tools / name).chmod(0o755)
    script = folder / krew.COMMAND
    script.write_text(krew.launcher())
    os.symlink("/bin/sh", tools / "sh")
    for tool in ("dirname", "readlink"):
        os.symlink(f"/usr/bin/{tool}", tools / tool)
    return subprocess.run(
        ["/bin/sh", script, "status", "a b"],
        env={"PATH": str(tools)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_first_python_that_fits_runs_the_command(tmp_path: Path) -> None:
    done = _launch(tmp_path, {"python3.12": 1, "python3.11": 0, "python3": 0})
    assert done.stdout.startswith("python3.11 -I -c ") and done.stdout.endswith(
        f"{tmp_path}/packages status a b\n"
    )


def test_without_a_python_that_fits_the_message_names_those_that_do(tmp_path: Path) -> None:
    done = _launch(tmp_path, {"python3": 1})
    assert done.returncode == 1 and "kubectl grpo needs Python 3.11 or 3.12" in done.stderr


def test_every_python_of_the_project_is_packaged() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    supported = SpecifierSet(project["requires-python"])
    assert set(krew.PYTHONS) == {f"3.{minor}" for minor in range(30) if f"3.{minor}" in supported}


def test_an_archive_depends_on_its_files_alone(tmp_path: Path) -> None:
    digests = set()
    for number, name in enumerate(("one", "other")):
        folder = tmp_path / name
        (folder / "packages").mkdir(parents=True)
        (folder / "packages" / "a.py").write_text("a = 1\n")
        (folder / krew.COMMAND).write_text(krew.launcher())
        (folder / krew.COMMAND).chmod(0o700 + number * 0o055)
        os.utime(folder / "packages" / "a.py", (number, number))
        krew.write_archive(folder, file := tmp_path / f"{name}.tar.gz")
        digests.add(file.read_bytes())
    assert len(digests) == 1


@pytest.mark.parametrize("url", ["", "http://example.com/v1", "example.com"])
def test_an_address_that_krew_does_not_fetch_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(StageError, match="krew fetches archives by HTTPS only"):
        krew.package([], url, tmp_path)
