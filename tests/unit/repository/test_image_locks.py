"""The images' lists of packages: locked, complete, and nothing that a base brings."""

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from grpo_devcluster.image_locks import Base, Lock, installed, read_bases, render, texts
from grpo_devcluster.paths import REPO
from grpo_worker.common.requirements import same_minor

BASES = read_bases()
LOCK = (REPO / "uv.lock").read_text()
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
NEVER = re.compile(
    r"(pytorch-)?torch|(pytorch-)?triton|nvidia-.*|cuda-.*|.*nccl.*|transformer-engine.*|sglang|numpy"
)
WORKERS = ("trainer", "rollout")


def _lock(base: Base) -> Lock:
    return Lock(LOCK, base.python)


def _pins(name: str) -> dict[str, str]:
    """Return name -> version of an image's committed list."""
    lines = (REPO / f"images/{name}.txt").read_text().splitlines()
    pins = dict(line.removesuffix(" \\").split("==") for line in lines if "==" in line and line[0] != "#")
    assert pins
    return pins


def _needs(name: str, base: Base, extras: tuple[str, ...] = ("",)) -> list[Requirement]:
    """Return what the installed distribution ``name`` needs on the base's Python, by its own metadata."""
    here = {str(key): str(value) for key, value in default_environment().items()}
    here |= {"python_version": base.python, "python_full_version": f"{base.python}.0"}
    found = [Requirement(text) for text in metadata.requires(name) or ()]
    return [
        r for r in found if r.marker is None or any(r.marker.evaluate(here | {"extra": e}) for e in extras)
    ]


def test_the_lists_are_those_of_the_lock() -> None:
    for path, text in texts().items():
        assert (REPO / path).read_text() == text, f"{path} is out of date: run make image-locks"


@pytest.mark.parametrize("name", WORKERS)
def test_no_list_names_what_the_base_brings(name: str) -> None:
    assert [pin for pin in _pins(name) if NEVER.fullmatch(pin) or BASES[name].has(pin)] == []


@pytest.mark.parametrize("name", BASES)
def test_every_package_has_a_hash(name: str) -> None:
    entries = (REPO / f"images/{name}.txt").read_text().split("\n")[1:]
    text = "\n".join(entries).replace("\\\n", "")
    lines = text.splitlines()
    assert len(lines) == len(_pins(name))
    assert all(re.fullmatch(r"[a-z0-9.-]+==\S+( +--hash=sha256:[0-9a-f]{64})+ *", line) for line in lines)


@pytest.mark.parametrize("name", BASES)
def test_the_packages_need_only_each_other_and_the_base(name: str) -> None:
    """They are installed without dependencies; this reads the metadata of the wheels, not the lock."""
    base, pins = BASES[name], _pins(name)
    brought = _lock(base).closure((root, "") for root in base.provides_closure)
    have = {*pins, *brought}
    needed = {
        canonicalize_name(r.name): pin
        for pin in ("grpo-operator", *pins)
        for r in _needs(pin, base, base.extras if pin == "grpo-operator" and base.extras else ("",))
    }
    assert {n: by for n, by in needed.items() if n not in have and not base.has(n)} == {}


def test_a_missing_dependency_of_a_package_is_added_to_the_list() -> None:
    lock = Lock(
        """
        [[package]]
        name = "grpo-operator"
        version = "1"
        optional-dependencies = {worker = [{name = "ray", extra = ["default"]}, {name = "torch"}]}
        [[package]]
        name = "ray"
        version = "2"
        optional-dependencies = {default = [{name = "colorful"}, {name = "nt", marker = "os_name == 'nt'"}]}
        wheels = [{url = "x/ray-2-cp312-cp312-manylinux2014_x86_64.whl", hash = "sha256:a"},
                  {url = "x/ray-2-cp312-cp312-win_amd64.whl", hash = "sha256:b"},
                  {url = "x/ray-2-cp311-cp311-manylinux2014_x86_64.whl", hash = "sha256:c"}]
        [[package]]
        name = "colorful"
        version = "3"
        sdist = {url = "x/colorful-3.tar.gz", hash = "sha256:d"}
        [[package]]
        name = "torch"
        version = "4"
        dependencies = [{name = "nvidia-nccl-cu13"}]
        """,
        "3.12",
    )
    base = Base("trainer", "base:1", "3.12", ("worker",), ("torch",), (), {})
    assert installed(base, lock) == ["colorful", "ray"]
    assert render(base, lock).splitlines()[1:] == [
        "colorful==3 \\", "    --hash=sha256:d", "ray==2 \\", "    --hash=sha256:a",
    ]  # fmt: skip


@pytest.mark.parametrize("name", BASES)
def test_a_dockerfile_builds_on_the_named_base_and_installs_only_its_list(name: str) -> None:
    text = (REPO / f"Dockerfile.{name}").read_text()
    assert re.findall(r"^ARG BASE_IMAGE=(.*)$", text, re.M) == [BASES[name].image]
    installs = re.findall(r"pip install (.*?)(?:&&|\n[A-Z]|\Z)", text, re.S)
    assert len(installs) == 2 and all("--no-deps" in install for install in installs)
    assert "--require-hashes" in installs[0] and f"images/{name}.txt" in text
    assert "[worker]" not in text
    assert Version(f"{BASES[name].python}.0") in SpecifierSet(PROJECT["requires-python"])


@pytest.mark.parametrize("name", WORKERS)
def test_a_build_checks_its_packages_unless_an_environment_is_mounted(name: str) -> None:
    text = (REPO / f"Dockerfile.{name}").read_text()
    assert f"ARG REQUIREMENTS=/tmp/images/{name}.txt" in text and '[ ! -s "${REQUIREMENTS}" ]' in text
    assert re.search(r"\|\| python3 -m grpo_worker\.common\.requirements worker[a-z,]* /opt/", text)
    assert 'PIP_CONSTRAINT="" python3 -m pip' in text, "the base's constraints would refuse our versions"
    assert "/opt/grpo-packages/bin" in text, "KubeRay starts pods with `ray`"


@pytest.mark.parametrize("name", WORKERS)
def test_the_published_versions_of_the_base_fit_the_packages(name: str) -> None:
    base = BASES[name]
    published = {n: found["version"] for n, found in base.packages.items() if found["version"]}
    extras = ("worker", *(("rollout",) if name == "rollout" else ()))
    checked = set[str]()
    for package in ("grpo-operator", *_pins(name)):
        for need in _needs(package, base, extras if package == "grpo-operator" else ("",)):
            version = published.get(canonicalize_name(need.name))
            if version is None:
                continue
            checked.add(need.name)
            fits = need.specifier.contains(version, prereleases=True) or (
                need.name == "torch" and same_minor(str(need.specifier), version)
            )
            assert fits, f"{package} needs {need}, {base.image} has {version}"
    assert "torch" in checked and (name == "trainer" or "sglang" in checked)


def test_every_named_version_has_a_source() -> None:
    for base in BASES.values():
        assert {"python"} <= set(base.packages)
        for name, found in base.packages.items():
            assert set(found) == {"version", "verified", "source"} and found["source"], f"{base.name}: {name}"
            assert found["version"] or not found["verified"], (
                f"{base.name}: {name} is verified without a version"
            )
        assert Version(base.packages["python"]["version"]).release[:2] == Version(base.python).release


def test_both_images_have_the_same_ray_and_megatron_core() -> None:
    trainer, rollout = _pins("trainer"), _pins("rollout")
    assert all(trainer[name] == rollout[name] for name in ("ray", "megatron-core"))


def test_the_list_of_the_rollout_image_lies_beside_all_of_sglang() -> None:
    brought = _lock(BASES["rollout"]).closure([("sglang", "")])
    assert "transformers" in brought and not set(_pins("rollout")) & brought


def test_the_lists_are_the_only_files_of_packages() -> None:
    assert sorted(Path(REPO / "images").glob("*.txt")) == sorted(REPO / f"images/{n}.txt" for n in BASES)
