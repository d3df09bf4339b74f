"""Operator, command line and client need the packages that the wheel declares for them, and no others."""

import json
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import packages_distributions, requires

import pytest
from mypy.modulefinder import FindModuleCache, SearchPaths
from mypy.options import Options
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from grpo_devcluster.paths import REPO

SOURCE = REPO / "operator"
HEAVY = {"torch", "ray", "megatron", "transformers", "sglang", "numpy"}  # what only pods of jobs need
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
OF_EXTRA = "grpo_operator.cli.kubectl"  # modules that need the extra `cli`


def _distributions(declared: Iterable[str]) -> set[str]:
    """Return the names of all distributions that are installed with some requirements."""
    found: set[str] = set()
    pending = [(Requirement(text), "") for text in declared]
    while pending:
        requirement, extra = pending.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        if name not in found or requirement.extras:
            found.add(name)
            own = [Requirement(text) for text in requires(name) or ()]
            pending += [(each, wanted) for each in own for wanted in ("", *requirement.extras)]
    return found


def _packages(distributions: set[str]) -> set[str]:
    """Return the names of the packages that the distributions install."""
    owners = packages_distributions().items()
    return {name for name, of in owners if distributions.intersection(map(canonicalize_name, of))}


def _modules() -> list[str]:
    files = sorted((SOURCE / "grpo_operator").rglob("*.py"))
    names = [".".join(file.relative_to(SOURCE).with_suffix("").parts) for file in files]
    return [name.removesuffix(".__init__") for name in names]


def _errors(packages: Iterable[str], modules: list[str]) -> dict[str, str]:
    """Return the errors of imports in a process of its own that has only these packages."""
    asked = {"packages": sorted({*packages, "grpo_operator"}), "modules": modules}
    done = subprocess.run(
        [sys.executable, "-c", "from support.limited_imports import main; main()"],
        input=json.dumps(asked), capture_output=True, text=True, check=False,
        env={"PYTHONPATH": f"{SOURCE}:{REPO / 'tests'}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.fixture(scope="module")
def light() -> set[str]:
    return _packages(_distributions(PROJECT["dependencies"]))


def test_operator_and_client_need_the_wheels_own_dependencies_only(light: set[str]) -> None:
    modules = [name for name in _modules() if not name.startswith(OF_EXTRA)]
    assert "grpo_operator.client.asynchronous" in modules and "grpo_operator.handlers.main" in modules
    assert not light & HEAVY
    assert _errors(light, modules) == {}


def test_the_command_line_needs_its_extra_besides(light: set[str]) -> None:
    extra = _packages(_distributions(PROJECT["optional-dependencies"]["cli"]))
    modules = [name for name in _modules() if name.startswith(OF_EXTRA)]
    assert len(modules) > 10 and not extra & HEAVY
    assert _errors(light | extra, modules) == {}


def test_a_package_that_is_not_declared_is_found(light: set[str]) -> None:
    module = "grpo_operator.client.synchronous"
    assert _errors(light - {"kubernetes"}, [module]) == {module: "No module named 'kubernetes'"}
    assert "typer" in _errors(light, [f"{OF_EXTRA}.main"])[f"{OF_EXTRA}.main"]


def test_type_checkers_of_users_read_the_types() -> None:
    """Of installed packages they read those with the marker ``py.typed`` only."""
    installed = SearchPaths(python_path=(), mypy_path=(), package_path=(str(SOURCE),), typeshed_path=())
    found = FindModuleCache(installed, None, Options()).find_module("grpo_operator.client.synchronous")
    assert found == str(SOURCE / "grpo_operator" / "client" / "synchronous.py")
