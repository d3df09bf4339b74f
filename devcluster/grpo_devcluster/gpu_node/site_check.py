"""Checks that packed packages find all that they require, by their metadata alone.

They cannot be imported where they are packed, without torch for CUDA.
"""

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name

from grpo_devcluster.gpu_node.site_rules import Rules
from grpo_devcluster.paths import REPO

PYTHON = "3.12"  # of the machine
PROJECT = "grpo-operator"
_Wanted = tuple[str, Requirement]  # package that requires it, requirement


def problems(folder: Path, rules: Rules, repository: Path = REPO) -> list[str]:
    """Return a sentence for each requirement that is not met, and for each rule that is out of date."""
    packed = {canonicalize_name(d.metadata["Name"]): d for d in metadata.distributions(path=[str(folder)])}
    machine = {canonicalize_name(r.name): r for r in map(Requirement, rules.machine)}
    left_out = {canonicalize_name(name) for name in rules.left_out}
    found, used = [], set[str]()
    for owner, requirement in _wanted(packed, _project(repository)):
        name = canonicalize_name(requirement.name)
        used.add(name)
        if name in packed:
            excused = owner == PROJECT and name in rules.other_versions
            version = packed[name].version
            if not excused and not requirement.specifier.contains(version, prereleases=True):
                found.append(f"{owner} requires {requirement}, but {version} is packed")
        elif name in machine:
            found += _of_machine(owner, requirement, machine[name], rules)
        elif name not in left_out:
            found.append(f"{owner} requires {requirement}, which is neither packed nor on the machine")
    found += [f"{name} is packed, and named as left out or the machine's" for name in packed
              if name in left_out or name in machine]  # fmt: skip
    unused = (left_out | rules.other_versions.keys()) - used
    found += [f"nothing requires {name}: remove it from the rules" for name in unused]
    return sorted(set(found))


def _of_machine(owner: str, wanted: Requirement, has: Requirement, rules: Rules) -> list[str]:
    """Return what is wrong with the machine's version, where the rules name one (``==``)."""
    (version,) = [specifier.version for specifier in has.specifier] or [""]
    excused = owner == PROJECT and canonicalize_name(wanted.name) in rules.other_versions
    if excused or not version or wanted.specifier.contains(version, prereleases=True):
        return []
    return [f"{owner} requires {wanted}, but the machine has {version}"]


def _project(repository: Path) -> list[_Wanted]:
    """Return what the project requires for operator, trainers, engines and command line."""
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"]]
    for extra in project["optional-dependencies"].values():
        texts += extra
    return [(PROJECT, Requirement(text)) for text in texts]


def _wanted(
    packed: Mapping[NormalizedName, metadata.Distribution], roots: Iterable[_Wanted]
) -> Iterator[_Wanted]:
    """Yield what the project and all packed packages require, with the extras that are asked for."""
    pending = [*roots, *((name, Requirement(text)) for name in packed for text in _needs(packed[name], ""))]
    asked = set[tuple[str, str]]()
    while pending:
        owner, requirement = pending.pop()
        yield owner, requirement
        name = canonicalize_name(requirement.name)
        for extra in requirement.extras:
            if name in packed and (name, extra) not in asked:
                asked.add((name, extra))
                pending += [(name, Requirement(text)) for text in _needs(packed[name], extra)]


def _needs(package: metadata.Distribution, extra: str) -> Iterator[str]:
    """Yield what a package requires on the machine, for one of its extras or without any."""
    here = {str(key): str(value) for key, value in default_environment().items()}
    here |= {"python_version": PYTHON, "python_full_version": f"{PYTHON}.0", "extra": extra}
    for text in package.requires or ():
        marker = Requirement(text).marker
        if marker is None or marker.evaluate(here):
            yield text
