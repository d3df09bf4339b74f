"""The check of an image's packages when it is built."""

from importlib.metadata import PathDistribution
from pathlib import Path

import pytest

from grpo_worker.common.requirements import same_minor, unmet


def _package(folder: Path, name: str, *needs: str) -> PathDistribution:
    path = folder / f"{name}-1.dist-info"
    path.mkdir()
    lines = [f"Name: {name}", "Version: 1", *(f"Requires-Dist: {need}" for need in needs)]
    (path / "METADATA").write_text("\n".join(lines) + "\n")
    return PathDistribution(path)


def test_what_the_base_lacks_or_has_too_old_is_named(tmp_path: Path) -> None:
    ray = _package(tmp_path, "ray", "protobuf>=4", "click>=8", "gone", "windows; sys_platform == 'win32'")
    versions = {"protobuf": "3.20", "click": "8.1"}
    assert unmet([ray], ["worker"], versions) == [
        "ray 1 needs gone, which is not installed",
        "ray 1 needs protobuf>=4, but 3.20 is installed",
    ]


def test_extras_are_those_of_the_project_only(tmp_path: Path) -> None:
    project = _package(tmp_path, "grpo_operator", 'ray==2; extra == "worker"', 'sglang; extra == "rollout"')
    other = _package(tmp_path, "other", 'numba; extra == "worker"')
    assert unmet([project, other], ["worker"], {"ray": "3"}) == [
        "grpo-operator 1 needs ray==2, but 3 is installed"
    ]


@pytest.mark.parametrize(
    ("found", "fits"), [("2.14.0a0+4fdf77b940.nv26.08", True), ("2.14.1", True), ("2.13.0", False)]
)
def test_the_torch_of_a_base_needs_the_pinned_minor_version(tmp_path: Path, found: str, fits: bool) -> None:
    project = _package(tmp_path, "grpo_operator", 'torch==2.14.1; extra == "worker"')
    assert (unmet([project], ["worker"], {"torch": found}) == []) is fits


def test_only_pins_are_compared_by_minor_version() -> None:
    assert not same_minor(">=2.14", "2.14.0a0") and not same_minor("", "2.14.0a0")
    assert not same_minor("==2.14.*", "2.14.0a0") and not same_minor("==2.14.1,<3", "2.14.0a0")
